# SPDX-License-Identifier: Apache-2.0
"""What nvcc made of the kernels: code for every architecture, with the instructions that they are written for, and
loops that are no dearer than they were (tests/cuda_sass.txt).

A guard or a wrong flag can leave the body of a kernel empty in silence, and a division in a loop of copies costs more
than the copies. Needs a core built with CUDA, no device.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sass
from slimrt import _core

CORE = Path(_core.__file__)
BUDGETS = Path(__file__).parent / "cuda_sass.txt"
# SLIMRT_CUDA_ARCHS; .ci/run compiles for sm_80 alone, and nvcc before 12.8 knows no sm_120.
RELEASED = {"sm_80", "sm_90a", "sm_120", "sm_87" if platform.machine() == "aarch64" else "sm_89"}
BY_NVCC = b".nv_fatbin" in CORE.read_bytes()
pytestmark = pytest.mark.skipif(not BY_NVCC, reason="this core was built without nvcc")

# Products of matrices, copies to shared memory in the background, matrices out of shared memory. Whole rows on sm_90a:
# bulk copies, also of boxes of a tensor, barriers that count their bytes and a barrier of the cluster; before it
# barriers that count copies.
WANTED = {
    "decode_kernel": {"HMMA", "LDGSTS"},
    "prefill_kernel": {"HMMA", "LDSM"},
    "few_kernel": {"HMMA", "LDGSTS"},
    "many_kernel": {"HMMA", "LDGSTS", "LDSM"},
    "general_kernel": {"FFMA"},
    "7ClusterE": {"UBLKCP", "UTMALDG", "SYNCS", "UCGABAR", "HMMA", "LDSM"},
    "6BlocksE": {"LDGSTS", "ARRIVES", "HMMA", "LDSM"},
}
# absorbed_kernel<Cluster, ...>, <Blocks, ...>: of the latter sm_89 runs the code of sm_80.
ONLY = {"7ClusterE": {"sm_90a"}, "6BlocksE": {"sm_80", "sm_87", "sm_90a", "sm_120"}}


@pytest.fixture(scope="module")
def kernels():
    """Taking it all apart takes a quarter of a minute."""
    for name in ("cuobjdump", "nvdisasm"):
        if not sass.tool(name):
            pytest.skip(f"{name} is missing: install the extra dev")
    return list(sass.kernels(CORE))


@pytest.fixture(scope="module")
def found(kernels) -> dict[tuple[str, str], list[set[str]]]:
    """Of each architecture and kind of kernel, the instructions of every kernel."""
    found: dict[tuple[str, str], list[set[str]]] = {}
    for kernel in kernels:
        instructions = set(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", kernel.listing))
        for name in WANTED:
            if name in kernel.name:
                found.setdefault((kernel.architecture, name), []).append(instructions)
    return found


def test_kernels_have_the_instructions_that_they_are_for(found):
    """On every architecture that this core was compiled for."""
    compiled = {architecture for architecture, name in found if name not in ONLY}
    assert compiled and compiled <= RELEASED
    compiled_for = {"7ClusterE": ONLY["7ClusterE"], "6BlocksE": ONLY["6BlocksE"] & compiled | {"sm_80"}}
    wanted = {(architecture, name) for name in WANTED for architecture in compiled_for.get(name, compiled)}
    assert set(found) == wanted, "a kernel is missing, or is where it has no use"
    for (architecture, name), bodies in found.items():
        missing = [sorted(WANTED[name] - body) for body in bodies if not WANTED[name] <= body]
        assert not missing, (architecture, name, missing)


def test_loops_are_no_dearer_than_they_were(kernels):
    """Where a kernel is better, or rightly dearer: python tests/sass.py slimrt/_core*.so > tests/cuda_sass.txt."""
    release, budgets = sass.read(BUDGETS)
    if sass.release(CORE) != release:
        pytest.skip(f"{BUDGETS.name} is of nvcc {release}, this core of {sass.release(CORE)}")
    is_now = sass.table(CORE, kernels)
    compiled = {name.split()[0] for name in is_now}
    assert {name for name in budgets if name.split()[0] in compiled} <= is_now.keys(), "a kernel is gone"
    assert {name for name in is_now if name.startswith("sm_80 ")} <= budgets.keys(), "a kernel is new"
    assert sass.worse(is_now, budgets) == []


def test_blocks_have_the_static_shared_memory_that_plans_count(kernels):
    """kStatic of csrc/kernels/cuda/linear_few.cu and tests/cpp/cuda_plans_test.cpp. From sm_90 on cuobjdump also counts
    the 1 KB that the system reserves."""
    static = {
        shared - 1024 * (int(re.sub(r"\D", "", architecture)) >= 90)
        for (architecture, name), (_, _, shared) in sass.resources(CORE).items()
        if "few_kernel" in name
    }
    assert static == {144}


def test_clusters_wait_without_a_fence(kernels):
    """What blocks of a cluster write to each other tells its own barrier: MEMBAR.ALL.GPU took 500 cycles and more in
    each tile, CCTL.IVALL threw the block tables away."""
    clusters = [kernel for kernel in kernels if "7ClusterE" in kernel.name]
    assert clusters
    for kernel in clusters:
        code = sass.Code(kernel.listing)
        loops = code.instructions(set().union(*(blocks for _, blocks in code.loops)))
        assert sass.count(sass.COLD["fence"], loops) == 0, kernel.name
        assert re.search(r"\bSTAS\b", kernel.listing), kernel.name


@pytest.mark.nightly  # of a core as it is released
def test_every_architecture_is_there(found):
    assert {architecture for architecture, name in found if name not in ONLY} == RELEASED


@pytest.mark.nightly  # configures a build
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("native", {"native"}),
        ("89-real", {"compute_80,code=[compute_80,sm_80]"}),
        ("80;90a-real", {"compute_80,code=[compute_80,sm_80]", "compute_90a,code=[sm_90a]"}),
        ("80;120-real", {"compute_80,code=[compute_80,sm_80]", "compute_120,code=[sm_120]"}),
    ],
)
def test_every_device_that_a_build_is_for_has_code_of_teams(asked, wanted, tmp_path):
    """Not PTX alone, which the driver would compile for minutes."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is missing")
    options = ("-DSLIMRT_CUDA=ON", f"-DSLIMRT_CUDA_ARCHS={asked}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    source = Path(__file__).parents[1]
    command = ("cmake", "-S", source, "-B", tmp_path, "-G", "Ninja", *options, f"-DPython_EXECUTABLE={sys.executable}")
    subprocess.run(command, check=True, capture_output=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    [of_teams] = [entry["command"] for entry in commands if entry["file"].endswith("absorbed_sm80.cu")]
    assert set(re.findall(r"arch=(native|\w+,code=\[[\w,]+\])", of_teams)) == wanted


def test_devices_that_are_newer_find_code_that_they_can_compile():
    """Of kernels of clusters none: the others' are for them too."""
    listing = subprocess.run([sass.tool("cuobjdump"), "-lptx", CORE], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"sm_\w+\.ptx", listing)) == {"sm_80.ptx"}
