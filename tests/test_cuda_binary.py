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
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
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
    "6BlocksE": {"LDGSTS", "ARRIVES", "ATOMG", "HMMA", "LDSM"},
}
ONLY = {"7ClusterE": ("sm_90a",), "6BlocksE": ("sm_80",)}  # absorbed_kernel<Cluster, ...>, <Blocks, ...>


def test_every_architecture_has_the_instructions_that_kernels_are_for(tmp_path):
    """In one test, since taking it all apart takes half a minute."""
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
    for name, wanted in WANTED.items():
        for architecture in ONLY.get(name, ARCHITECTURES):
            bodies = found.pop((architecture, name), [])
            assert bodies, (architecture, name)
            assert all(wanted <= body for body in bodies), (architecture, name, [sorted(wanted - b) for b in bodies])
    assert not found, "kernels where they have no use"


def test_devices_that_are_newer_find_code_that_they_can_compile():
    """Of kernels of clusters none: the others' are for them too."""
    listing = subprocess.run([tool("cuobjdump"), "-lptx", CORE], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"sm_\w+\.ptx", listing)) == {"sm_80.ptx"}
