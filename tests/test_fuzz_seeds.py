# SPDX-License-Identifier: Apache-2.0
"""What fuzzing starts from (tests/fuzz) is whole, so that it reaches what comes after the first check; and what came of
it stays mended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conftest import TESTS
from slimrt import _core

sys.path.insert(0, str(TESTS / "fuzz"))
import make_seeds  # noqa: E402


def test_every_seed_that_is_a_model_can_be_planned(tmp_path):
    make_seeds.write_all(tmp_path)
    assert set(make_seeds.ARCHITECTURES) == {architecture["name"] for architecture in _core.architectures()}
    models = [*make_seeds.ARCHITECTURES, *make_seeds.VARIANTS, "owners"]
    for name in models:
        path = tmp_path / f"{name}.gguf"
        assert path.read_bytes().endswith(make_seeds.OPTIONS)
        planned = _core.plan(str(path))
        assert (planned["n_layers"] or planned["encoder"]["n_layers"]) in (1, 2), name


PLAN = """
import resource, sys
import slimrt._core
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
print(slimrt._core.plan(sys.argv[1])["scratch"])
"""


@pytest.mark.unsanitized
@pytest.mark.parametrize("arch", ["moonshine", "chronos2"])
def test_long_sources_are_planned_without_them(arch, tmp_path):
    """A source of 2^24 rows of Moonshine has 6 billion samples, one of Chronos-2 may be so many series: a plan counts
    them and does not hold them."""
    path = tmp_path / "long.gguf"
    long = {f"{arch}.encoder.context_length": 1 << 24}
    make_seeds.write(path, lambda writer: make_seeds.model(writer, long, {}), arch)
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    samples = 64 * 3 * 2 if arch == "moonshine" else 1
    assert int(done.stdout) > (1 << 24) * samples * 4  # float32
