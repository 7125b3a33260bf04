# SPDX-License-Identifier: Apache-2.0
"""What the repository says of itself is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slimrt import core

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("csrc", "python", "tools", "training") for path in (ROOT / folder).rglob("*")]


def test_comments_point_to_documents_that_are_there():
    named = re.compile(r"[\w/-]*[a-z]\.md\b|cache-math\b")
    gone = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".py"}
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    }
    assert SOURCES and not gone


@pytest.mark.parametrize("name", ["adding", "architecture", "arm", "boards", "cuda", "testing"])
def test_documents_of_the_code_call_it_what_it_is_called(name):
    """Names in them with a capital inside or an underscore are in the sources."""
    paths = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *SOURCES, *(ROOT / "tests").rglob("*")]
    kinds = {".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".txt", ".toml"}
    text = " ".join(f"{path.name} {path.read_text(encoding='utf-8')}" for path in paths if path.suffix in kinds)
    words = set(re.findall(r"\w+", text))
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    names = {
        part for one in quoted if re.fullmatch(r"[A-Za-z_][\w:.]*(\(\))?", one) for part in re.findall(r"\w+", one)
    }
    named = {one for one in names if "_" in one or re.search(r"[a-z][A-Z]", one)}
    assert named and not named - words


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.gguf")), ids=lambda path: path.stem)
def test_shipped_models_are_called_what_their_files_are(path):
    assert core.GgufFile(str(path)).value("general.name") == path.stem


def test_quick_tests_are_there():
    named = (ROOT / "tests/quick.txt").read_text(encoding="utf-8").split()
    assert named and not any(line.startswith("-") for line in named)
    for line in named:
        path, *names = line.split("[")[0].split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert all(re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE) for name in names), line
