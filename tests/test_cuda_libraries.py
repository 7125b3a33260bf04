# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt, which multiplies prompts on CUDA devices: where it is looked for, and what is said of it."""

from __future__ import annotations

import sys

import pytest

from conftest import CUDA_MISSING
from slimrt import _core, core

needs_device = pytest.mark.skipif(bool(CUDA_MISSING), reason=f"no CUDA device: {CUDA_MISSING}")


@pytest.mark.unsanitized
def test_cublaslt_of_wheels_is_found(monkeypatch, tmp_path):
    """Of the newest version first; pip keeps them where no loader looks."""
    wanted = [tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"]
    wanted += [tmp_path / "nvidia" / "cublas" / "lib" / "libcublasLt.so.12"]
    for path in wanted:
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = core._cublas_lt_of_pip()
    assert [path for path in found if path.startswith(str(tmp_path))] == [str(path) for path in wanted]


@pytest.mark.unsanitized
@needs_device
def test_doctor_says_what_multiplies_prompts(run, monkeypatch):
    assert (_core.cublas_lt_library() or "pip install nvidia-cublas") in run("doctor", "-t", "1")[1]
    monkeypatch.setenv("SLIMRT_CUBLASLT", "0")
    assert "not used (SLIMRT_CUBLASLT=0)" in run("doctor", "-t", "1")[1]


@pytest.mark.unsanitized
@pytest.mark.skipif("emulated" not in "".join(_core.cuda_devices()[0]), reason="a device is what it is")
@pytest.mark.parametrize(("capability", "said"), [(75, ""), (80, ""), (86, ""), (87, "once"), (90, ""), (120, "once")])
def test_a_note_where_the_driver_compiles_kernels(capability, said, monkeypatch):
    """Code of an earlier device of a kind runs; Tegra (8.7) runs none of others."""
    monkeypatch.setenv("SLIMRT_EMULATED_CAPABILITY", str(capability))
    names, found = _core.cuda_devices()
    assert names == ["emulated"] and (said in found if said else not found)


@pytest.mark.skipif("emulated" not in "".join(_core.cuda_devices()[0]), reason="a device is what it is")
def test_a_device_that_records_no_steps_does_them_directly_and_it_is_said(tiny, run, monkeypatch):
    arguments = ("generate", tiny, "-p", "a", "--device", "cuda", "-n", "6", "--temp", "0")
    _, expected, _ = run(*arguments)
    monkeypatch.setenv("SLIMRT_EMULATED_NO_GRAPHS", "2")
    code, out, err = run(*arguments)
    assert (code, out) == (0, expected) and err.count("records no steps as graphs") == 1


@pytest.mark.skipif("emulated" not in "".join(_core.cuda_devices()[0]), reason="a device is what it is")
def test_the_note_is_seen_once(tiny, run, monkeypatch):
    monkeypatch.setenv("SLIMRT_EMULATED_CAPABILITY", "87")
    code, _, err = run("generate", tiny, "-p", "a", "--device", "cuda", "-n", "1", "--temp", "0")
    assert code == 0 and err.count("compiled by the driver") == 1
    code, _, err = run("generate", tiny, "-p", "a", "-n", "1", "--temp", "0")
    assert code == 0 and "compiled" not in err
