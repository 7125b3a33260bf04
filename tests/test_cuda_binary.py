# SPDX-License-Identifier: Apache-2.0
"""What nvcc made of the kernels: code for every architecture, with the instructions that they are written for.

A guard or a wrong flag can leave the body of a kernel empty in silence. Needs a core built with CUDA, no device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

from slimrt import _core

CORE = Path(_core.__file__)
RELEASED = {"sm_80", "sm_89", "sm_90a"}  # SLIMRT_CUDA_ARCHS; .ci/run compiles for sm_80 alone
BY_NVCC = b".nv_fatbin" in CORE.read_bytes()
pytestmark = pytest.mark.skipif(not BY_NVCC, reason="this core was built without nvcc")


def tool(name: str) -> str:
    """A program of NVIDIA's wheels, or of a toolkit; the test is skipped without it."""
    try:
        for path in files(f"nvidia-cuda-{name}") or []:
            if path.name == name:
                return str(path.locate())
    except PackageNotFoundError:
        pass
    found = shutil.which(name)
    if not found:
        pytest.skip(f"{name} is missing: install the extra dev")
    return found


# Products of matrices, copies to shared memory in the background, matrices out of shared memory. Whole rows on sm_90a:
# bulk copies, barriers that count their bytes and a barrier of the cluster; before it barriers that count copies.
WANTED = {
    "decode_kernel": {"HMMA", "LDGSTS"},
    "prefill_kernel": {"HMMA", "LDSM"},
    "few_kernel": {"HMMA", "LDGSTS"},
    "many_kernel": {"HMMA", "LDGSTS", "LDSM"},
    "general_kernel": {"FFMA"},
    "7ClusterE": {"UBLKCP", "SYNCS", "UCGABAR", "HMMA", "LDSM"},
    "6BlocksE": {"LDGSTS", "ARRIVES", "HMMA", "LDSM"},
}
ONLY = {"7ClusterE": ("sm_90a",), "6BlocksE": ("sm_80",)}  # absorbed_kernel<Cluster, ...>, <Blocks, ...>


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[str, str], list[set[str]]]:
    """Of each architecture and kind of kernel, the instructions of every kernel. Taking it all apart takes a while."""
    tmp_path = tmp_path_factory.mktemp("cubins")
    subprocess.run([tool("cuobjdump"), "-xelf", "all", CORE], cwd=tmp_path, check=True, capture_output=True)
    found: dict[tuple[str, str], list[set[str]]] = {}
    for cubin in sorted(tmp_path.glob("*.cubin")):
        if not any(name.encode() in cubin.read_bytes() for name in WANTED):
            continue
        listing = subprocess.run([tool("nvdisasm"), "-c", cubin], check=True, capture_output=True, text=True).stdout
        for body in listing.split(".section\t.text.")[1:]:
            instructions = set(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", body))
            for name in WANTED:
                if name in body.split(",")[0]:
                    found.setdefault((cubin.name.split(".")[-2], name), []).append(instructions)
    return found


def test_kernels_have_the_instructions_that_they_are_for(found):
    """On every architecture that this core was compiled for."""
    compiled = {architecture for architecture, name in found if name not in ONLY}
    assert compiled and compiled <= RELEASED
    wanted = {(architecture, name) for name in WANTED for architecture in ONLY.get(name, compiled)}
    assert set(found) == wanted, "a kernel is missing, or is where it has no use"
    for (architecture, name), bodies in found.items():
        missing = [sorted(WANTED[name] - body) for body in bodies if not WANTED[name] <= body]
        assert not missing, (architecture, name, missing)


@pytest.mark.nightly  # of a core as it is released
def test_every_architecture_is_there(found):
    assert {architecture for architecture, name in found if name not in ONLY} == RELEASED


def test_devices_that_are_newer_find_code_that_they_can_compile():
    """Of kernels of clusters none: the others' are for them too."""
    listing = subprocess.run([tool("cuobjdump"), "-lptx", CORE], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"sm_\w+\.ptx", listing)) == {"sm_80.ptx"}
