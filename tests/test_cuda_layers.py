# SPDX-License-Identifier: Apache-2.0
"""Layers on several devices: what one device computes with all of them comes out, whatever lies where.

Two instruction sets of the CPU are two devices too, so that the split is tested without a GPU; beside a GPU, or the
emulator of tests/cuda_host, also between it and the CPU, and between two of it.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import no_cache
import slimrt
from conftest import CUDA_MISSING, GOLDEN, GREEDY, ISAS, decode, open_engine, relative
from seq2seq_models import MODELS
from slimrt import _core, core
from slimrt.cache.planner import resolve_device
from slimrt.errors import UnsupportedError, WontFitError
from test_cuda import FLOAT32, bound
from tiny_model import write_tiny

needs_device = pytest.mark.skipif(bool(CUDA_MISSING), reason=f"no CUDA device: {CUDA_MISSING}")
IDS = np.random.default_rng(5).integers(3, 100, 40).astype(np.int32)
N_PREFILL = 36
CASES = [
    ("llama_mha", "kv"),
    ("llama_gqa_tied", "kv"),  # the embedding is the head: each device has its own
    ("mistral_window", "kv"),
    ("gpt2_tanh", "kv"),  # learned positions
    ("gemma2", "kv"),
    ("granite_gqa", "kv"),
    ("granitemoe", "kv"),
    ("llama_mha", "k"),
    ("llama_gqa_tied", "k+r"),
    ("gpt2_tanh", "v"),
    ("gpt2_tanh", "x"),
    ("bloom", "k"),  # a table of ALiBi each
    ("stablelm", "xr"),
    ("minicpm3", "latent"),
]
# The first layer apart, then all but it.
SPLITS = [
    f"cpu=1,{ISAS[-1]}",
    *(pytest.param(split, marks=needs_device) for split in ("cpu=1,cuda", "cuda=1,cpu", "cuda:0=1,cuda:1")),
]


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    monkeypatch.setenv("SLIMRT_EMULATED_DEVICES", "2")


def need_two(split: str) -> None:
    if "cuda:1" in split and len(_core.cuda_devices()[0]) < 2:
        pytest.skip("there is one CUDA device")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])
def test_every_mode(name, mode, split, convert):
    """A prompt in parts, which modes with dense rows take layer by layer, then token by token: recorded steps."""
    need_two(split)
    path = convert(GOLDEN / name)
    whole, split_up = (
        decode(open_engine(path, mode, "f32", device=device, n_batch=16), IDS, N_PREFILL) for device in ("cpu", split)
    )
    assert relative(split_up, whole) < bound(mode, "f32", path)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", ["kivi", "lowrank"])
def test_rows_age_where_they_are(mode, split, convert):
    """Beyond what is recent, and back where the text is cut."""
    need_two(split)
    path, ids = convert(GOLDEN / "llama_gqa_tied"), np.random.default_rng(2).integers(3, 100, 210).astype(np.int32)
    logits = []
    for device in ("cpu", split):
        engine = open_engine(path, mode, "q8", n_ctx=256, n_batch=48, device=device)
        sequence = engine.new_sequence()
        logits.append(decode(engine, ids, 190, sequence))
        engine.truncate(sequence, 70 if engine.can_truncate(sequence, 70) else 0)
        logits[-1] = np.concatenate([logits[-1], decode(engine, ids[:3], 0, sequence)])
    assert relative(*logits) < bound("kv", "f16", path)


@pytest.mark.parametrize("split", SPLITS)
def test_sequences(split, convert):
    """Forked, whose last block is copied on each device, cut, released and saved: each says what it says alone."""
    need_two(split)
    path = convert(GOLDEN / "llama_mha")
    engine = open_engine(path, "kv", "f32", device=split, n_ctx=96, n_seqs=4)
    alone = open_engine(path, "kv", "f32", n_ctx=96, n_seqs=4)
    texts = {engine.new_sequence(): list(IDS[:n]) for n in (5, 33)}
    engine.append([(sequence, np.array(ids, np.int32)) for sequence, ids in texts.items()])
    first, second = texts
    texts[engine.fork(second)] = list(texts[second])
    engine.truncate(first, 2)
    texts[first] = texts[first][:2]
    for token in (IDS[0], IDS[1]):
        if token == IDS[1]:
            engine.free_sequence(second)
            del texts[second]
        got = engine.append([(sequence, np.array([token + sequence], np.int32)) for sequence in texts])
        for row, (sequence, ids) in zip(got, texts.items(), strict=True):
            ids.append(token + sequence)
            own = alone.new_sequence()
            assert relative(row, decode(alone, np.array(ids), len(ids) - 1, own)[-1]) < FLOAT32
            alone.free_sequence(own)
    for there, back in ((engine, alone), (alone, engine)):  # saved rows do not know who computed them
        sequence = there.new_sequence()
        there.append([(sequence, IDS[:35])])
        saved = there.save_sequence(sequence)
        moved = back.load_sequence(saved)
        assert np.array_equal(back.save_sequence(moved), saved)
        got, wanted = (one.append([(s, IDS[35:36])]) for one, s in ((back, moved), (there, sequence)))
        assert relative(got, wanted) < FLOAT32
        there.free_sequence(sequence)


@pytest.mark.parametrize("split", SPLITS)
def test_the_plan_is_what_is_allocated(split, convert):
    need_two(split)
    path, options = convert(GOLDEN / "gpt2_tanh"), {"n_ctx": 64, "n_seqs": 2, "device": split}
    engine = _core.Engine(str(path), **options)
    plan, memory, parts = _core.plan(str(path), **options), engine.memory(), engine.info()["parts"]
    engine.append([(engine.new_sequence(), IDS)], all_logits=True)
    assert engine.memory() == memory == {key: plan[key] for key in memory}
    assert [(part["begin"], part["end"]) for part in parts] == [(0, 1), (1, 3)]
    assert [part["bytes"] for part in parts] == [part["bytes"] for part in plan["parts"]]
    assert sum(part["bytes"] for part in parts) == memory["total"] + memory["mapped"]
    assert [part["device"] for part in parts] == [one.partition("=")[0] for one in split.split(",")]
    head, _, first = engine.info()["device"].partition(": layers 1 to 2; ")
    assert head.startswith("cuda" if "cuda" in parts[1]["device"] else "cpu") and first.endswith(": layers 0 to 0")


def test_how_layers_are_shared_out(convert):
    def ends(devices: str, name: str = "olmo3") -> list[int]:
        return [part["end"] for part in _core.plan(str(convert(GOLDEN / name)), device=devices)["parts"]]

    isa = ISAS[-1]
    assert ends(f"cpu,{isa}=2") == [3, 5] and ends(f"cpu=4,{isa}=1") == [4, 5]
    assert ends(f"cpu=4,{isa}=3") == [2, 5] and ends(f"cpu,{isa}=9") == ends(f"cpu=7,{isa}=5") == [5]  # the last first
    assert ends("cpu=2,cuda=0,portable") == [2, 5]  # nobody asks whether there is such a device
    if len(ISAS) > 2:
        assert ends(f"cpu=1,{ISAS[1]},portable") == [1, 3, 5]  # by free memory, which is the same


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("cpu=2,portable=2", "1 of 5 layers"),
        ("cpu,cpu=2", "twice"),
        ("cpu,portable=", "number of layers"),
        ("cpu,portable=-1", "number of layers"),
        ("cpu,portable=2x", "number of layers"),
        ("cpu,", "unknown device ''"),
    ],
)
def test_devices_that_make_no_sense(devices, said, convert):
    with pytest.raises((ValueError, UnsupportedError), match=said):
        _core.plan(str(convert(GOLDEN / "olmo3")), device=devices)


def test_layers_that_cannot_be_apart(tmp_path, convert, seq2seq):
    """Encoders, embeddings in each layer, and readers of another layer's rows, which go where these are."""
    split = f"cpu=1,{ISAS[-1]}"
    for path in (convert(GOLDEN / "gemma4_small"), convert(seq2seq(next(iter(MODELS))))):
        with pytest.raises(UnsupportedError, match="one device for all"):
            _core.plan(str(path), device=split)
    config = no_cache.cla(2)
    directory = no_cache.write(tmp_path / "cla", config, no_cache.tensors_of(config))
    slimrt.convert(directory, tmp_path / "cla.gguf", progress=False)
    path = str(tmp_path / "cla.gguf")
    assert [part["end"] for part in _core.plan(path, device=f"cpu=3,{ISAS[-1]}")["parts"]] == [4, 6]
    with pytest.raises(UnsupportedError, match="share rows with layer 4"):
        _core.plan(path, device=f"cpu=5,{ISAS[-1]}")
    whole, split_up = (
        decode(_core.Engine(path, device=device, n_ctx=64), IDS % 61, N_PREFILL)
        for device in ("cpu", f"cpu=3,{ISAS[-1]}")
    )
    assert relative(split_up, whole) < 1e-3  # rows of f16


def test_what_gpu_layers_mean(monkeypatch):
    monkeypatch.setattr(core, "cuda_devices", lambda: (["one"], ""))
    assert resolve_device("auto") == "cpu"  # as conftest.py says
    assert resolve_device("auto", 12) == "cpu,cuda=12" and resolve_device("auto", -1) == "cuda"
    monkeypatch.delenv("SLIMRT_DEVICE")
    assert resolve_device("auto") == "auto"
    assert resolve_device("cuda", 0) == resolve_device("auto", 0) == "cpu"
    assert resolve_device("auto", 12) == resolve_device("cuda", 12) == "cpu,cuda=12"
    assert resolve_device("cuda:1", 3) == "cpu,cuda:1=3" and resolve_device("cuda:1", -1) == "cuda:1"
    assert resolve_device("cuda:0=20,cuda:1=12") == "cuda:0=20,cuda:1=12"
    for device in ("cpu", "cuda:0,cuda:1", "cpu,cuda=3"):
        with pytest.raises(UnsupportedError, match="do not go together"):
            resolve_device(device, 3)
    for device in ("cpu,", "cpu,cuda=", "cuda=x", "auto,cuda"):
        with pytest.raises(UnsupportedError, match="device"):
            resolve_device(device)
    monkeypatch.setattr(core, "cuda_devices", lambda: ([], "no driver"))
    assert resolve_device("cuda", 3) == "cpu,cuda=3"  # who names it insists
    with pytest.warns(UserWarning, match="on the CPU: no driver"):
        assert resolve_device("auto", -1) == "cpu"
    assert resolve_device("auto") == "cpu"
    monkeypatch.setenv("SLIMRT_DEVICE", "cuda:1")
    assert resolve_device("auto") == "cuda:1" and resolve_device("cpu") == "cpu"


def test_gpu_layers_on_the_command_line(tiny, run, monkeypatch):
    monkeypatch.delenv("SLIMRT_DEVICE")
    code, out, err = run("generate", tiny, "-p", "a", "-ngl", "0", "--temp", "0", "-n", "2")
    assert code == 0 and out, err
    code, out, err = run("generate", tiny, "-p", "a", "-ngl", "20", "--device", "cpu")
    assert code == 2 and "do not go together" in err
    if CUDA_MISSING:
        code, out, err = run("generate", tiny, "-p", "a", "-ngl", "1", "--temp", "0", "-n", "2")
        assert code == 0 and out and CUDA_MISSING in err
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            code, out, err = run("generate", tiny, "-p", "a", "-ngl", "1", "--temp", "0", "-n", "2", "-q")
        assert code == 0 and out and not err


@needs_device
def test_a_model_on_two_devices(tiny, run, monkeypatch):
    texts = []
    for given in ({}, {"n_gpu_layers": 1}, {"device": "cpu,cuda=1"}, {"n_gpu_layers": 99}):
        with slimrt.Model(tiny, n_ctx=64, **given) as model:
            texts.append(model.generate("the cat sat", max_tokens=12, **GREEDY).text)
            assert model.info()["device"].startswith("cuda" if given else "cpu")
            assert len(model.info()["parts"]) == (2 if given and 99 not in given.values() else 1)
    assert len(set(texts)) == 1
    monkeypatch.delenv("SLIMRT_DEVICE")  # which --device is the twin of
    code, out, err = run("plan", tiny, "-ngl", "1", "-c", "64")
    assert code == 0 and "layers 0 to 0 on cpu" in out and "layers 1 to 1 on cuda: " in out, err


@pytest.mark.skipif("emulated" not in "".join(_core.cuda_devices()[0]), reason="devices have the memory that they have")
def test_what_would_fit_is_said(tmp_path, monkeypatch):
    """Of 12 layers of which a small device holds some: as many as are named fit, and one more does not."""
    deep, size = write_tiny(tmp_path / "deep.gguf", n_layers=12), {"n_ctx": 4096, "n_seqs": 16}
    one, two = (_core.plan(str(deep), device=f"cpu,cuda={n}", **size)["parts"][1]["bytes"] for n in (1, 2))
    monkeypatch.setenv("SLIMRT_EMULATED_MEMORY", str(int(1.02 * ((300 << 20) + one + 5 * (two - one)))))
    with pytest.raises(WontFitError, match="free") as error:
        slimrt.Model(deep, device="cuda", **size)
    (option,) = (one for one in error.value.options if one.startswith("--gpu-layers"))
    n = int(option.split()[1])
    plan = slimrt.plan(deep, n_gpu_layers=n + 1, **size)
    assert 4 < n < 8 and not plan.fits and plan.gpu_layers == n and f"-ngl {n}" in plan.table()
    with pytest.raises(WontFitError, match=f"cuda, layers {11 - n} to 11: needs .* fewer layers"):
        slimrt.Model(deep, n_gpu_layers=n + 1, **size)
    with slimrt.Model(deep, n_gpu_layers=n, **size) as model:
        assert [(part["begin"], part["end"]) for part in model.info()["parts"]] == [(0, 12 - n), (12 - n, 12)]
    assert "--gpu-layers" not in str(wont_fit_of(deep, memory_limit="1MiB", **size))


def wont_fit_of(path, **given) -> WontFitError:
    """A limit is one of all devices together: sharing layers out does not help."""
    with pytest.raises(WontFitError) as error:
        slimrt.Model(path, device="cuda", **given)
    return error.value
