# SPDX-License-Identifier: Apache-2.0
"""Device "auto": a GPU where a model fits it, else the CPU, which is said (slimrt.cache.placement)."""

from __future__ import annotations

import json

import pytest

import slimrt
from conftest import CUDA_MISSING, GREEDY
from slimrt import core
from slimrt.cache.config import CacheChoice
from slimrt.cache.placement import placed
from slimrt.cache.planner import Planner
from slimrt.errors import DeviceError, UnsupportedError
from slimrt.modelfile.source import ModelSource

GIB = 1 << 30


class Gpu:
    """A device that plans as the CPU does, with as much memory as is said; `error`: what it answers instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.free, self.error = 10 * GIB, None
        plan, available = core.plan, core.available_memory

        def gpu_plan(*args, device: str = "cpu", **options):
            if "cuda" in device and self.error:
                raise self.error
            return plan(*args, device="cpu", **options)

        def free(device: str = "cpu") -> int:
            return self.free if "cuda" in device else available(device)

        monkeypatch.setattr(core, "plan", gpu_plan)
        monkeypatch.setattr(core, "available_memory", free)
        monkeypatch.setattr(core, "cuda_devices", lambda: (["a GPU"], ""))
        monkeypatch.delenv("SLIMRT_DEVICE")


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


def planner_of(path, memory_limit=None, device="auto") -> Planner:
    return Planner.of(ModelSource.of(path, False), memory_limit, 1, 32, 1, device)


def on(path, *caches: str, n_ctx: int = 64, **options) -> Planner:
    return placed(planner_of(path, **options), [CacheChoice.of(one) for one in caches or ("auto",)], n_ctx)


def test_a_model_that_fits_is_on_the_gpu(gpu, tiny):
    chosen = on(tiny)
    assert (chosen.device, chosen.limit, chosen.each) == ("cuda", gpu.free, True)
    assert on(tiny, "kv", "k:q8").device == "cuda"
    chosen = on(tiny, memory_limit="1GiB")
    assert (chosen.device, chosen.limit, chosen.each) == ("cuda", GIB, False)
    result = slimrt.plan(tiny, n_ctx=64)
    assert result.device == "cuda" and result.memory_limit == gpu.free
    assert result.conclusion().endswith("10.0 GiB on cuda")


def test_a_device_that_is_named_is_not_questioned(gpu, tiny):
    gpu.free = 0
    assert on(tiny, device="cpu").device == "cpu"
    assert on(tiny, device="cuda").device == "cuda"


def test_what_does_not_fit_is_on_the_cpu_and_it_says_so(gpu, tiny):
    needed = planner_of(tiny).sizes(CacheChoice.of("kv"), 64).total
    gpu.free = needed - 1
    with pytest.warns(UserWarning, match=r"on the CPU, since on cuda it does not fit: needs .* available"):
        chosen = on(tiny, "kv")
    assert chosen.device == "cpu" and chosen.limit > gpu.free and not chosen.each
    gpu.free = needed
    assert on(tiny, "kv").device == "cuda"
    with pytest.warns(UserWarning, match="caches at once need"):
        assert on(tiny, "kv", "kv:q8").device == "cpu"


@pytest.mark.parametrize("error", [UnsupportedError("no such kernel."), DeviceError("CUDA failed at something")])
def test_a_gpu_that_cannot_is_not_used_and_the_reason_is_said(gpu, tiny, error):
    gpu.error = error
    with pytest.warns(UserWarning, match=f"since on cuda {str(error).rstrip('.')}$"):
        assert on(tiny).device == "cpu"
    with pytest.warns(UserWarning, match="what is fastest there"):
        assert on(tiny, "fastest").device == "cpu"


def test_what_no_device_can_is_told_once(gpu, tiny, recwarn):
    with pytest.raises(slimrt.UnsupportedError, match="cache mode"):
        slimrt.plan(tiny, cache="nonsense")
    assert not recwarn.list


def test_the_command_says_where_a_model_is(gpu, tiny, run, recwarn):
    code, out, err = run("plan", tiny, "--json", "--ctx", "64")
    assert code == 0 and json.loads(out)["device"] == "cuda", err
    gpu.free = 1
    code, out, err = run("plan", tiny, "--json", "--ctx", "64")
    assert code == 0 and json.loads(out)["device"] == "cpu" and "on the CPU, since on cuda it does not fit" in err
    code, out, err = run("generate", tiny, "-p", "a", "--temp", "0", "-n", "2", "--ctx", "64")
    assert code == 0 and out and "on the CPU, since" in err, err
    code, out, err = run("generate", tiny, "-p", "a", "--temp", "0", "-n", "2", "--ctx", "64", "-q")
    assert code == 0 and out and "on the CPU" not in err and not recwarn.list


@pytest.mark.skipif(bool(CUDA_MISSING), reason=f"no CUDA device: {CUDA_MISSING}")
def test_auto_on_cuda(tiny, monkeypatch):
    monkeypatch.delenv("SLIMRT_DEVICE")
    with slimrt.Model(tiny, n_ctx=64) as model:
        assert model.info()["device"].startswith("cuda")
        text = model.generate("a b", max_tokens=4, **GREEDY).text
    with slimrt.Model(tiny, n_ctx=64, device="cpu") as model:
        assert model.generate("a b", max_tokens=4, **GREEDY).text == text
