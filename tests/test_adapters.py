# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/adapters.md, run as they stand there."""

from __future__ import annotations

import re

import pytest

import slimrt
from conftest import TESTS

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

ROOT = TESTS.parent
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adapters.md").read_text(), re.DOTALL)


def program(word: str) -> str:
    (found,) = (text for text in PROGRAMS if word in text)
    return found


def test_in_the_place_of_llama_cpp_python(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(program("create_embedding"), {})
    out = capsys.readouterr().out
    with slimrt.Model("models/tale-llama.gguf") as model:
        first = model.generate("Anna was a baker", max_tokens=8, temperature=0).text
        second = model.generate("Anna was a", max_tokens=8, temperature=0).text
        assert out.startswith(f"Anna was a baker{first} {{'prompt_tokens': ")
        assert out.endswith(f"\n{second}{model.info()['d_model']}\n")


def test_langchain():
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    names: dict = {"__name__": __name__}
    exec(program("langchain_core"), names)
    path = str(ROOT / "models" / "tale-llama.gguf")
    chain = names["Slim"](model_path=path, temperature=0.0, max_tokens=12)
    with slimrt.Model(path) as model:
        wanted = model.generate("Anna was a baker", max_tokens=12, temperature=0, stop=["."]).text
    assert chain.invoke("Anna was a baker", stop=["."]) == wanted
    pieces = list(chain.stream("Anna was a baker", stop=["."]))
    assert "".join(pieces) == wanted and len(pieces) > 2
    assert chain.batch(["Anna was a baker"], stop=["."]) == [wanted]
    with pytest.raises(TypeError, match="generate has no temp: here it is called temperature"):
        chain.invoke("a", temp=0)
