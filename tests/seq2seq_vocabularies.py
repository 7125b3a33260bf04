# SPDX-License-Identifier: Apache-2.0
"""What the tests of encoder-decoders' tokenizers share: texts, and SentencePiece models trained on a committed one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

import slimrt
from conftest import TESTS

PROBES = [
    "We hold these truths, and said: don't!",
    "",
    " ",
    "  two  spaces ",
    "Gr\u00f6\u00dfe \u4f60\u597d \U0001f642\U0001f642 \u0416\u0436",
    "a\n\n  b\tc\r\n",
    "\u00a0x\u2003y\u200b",
    "e\u0301 \ufb01 \u00bd \uff21",
    "x</s>y </s> z",
    "<pad><mask> a <unk>",
    "en_XX eng_Latn __en__ b",
    "\u2581a \u2581",
    "pneumono" * 12,
]


@lru_cache
def book() -> tuple[str, ...]:
    return tuple((TESTS.parent / "models" / "calibration.txt").read_text()[:60_000].split(". "))


def opened(fields: dict) -> slimrt.Tokenizer:
    return slimrt.Tokenizer.from_gguf_fields({key: field.value for key, field in fields.items()})


def trained(path: Path, vocab_size: int = 300, more: str = "", **options) -> Path:
    """A SentencePiece model with the usual ids: <unk>, <s>, </s>."""
    pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter([*book(), *[more] * 20]), model_prefix=str(path), vocab_size=vocab_size,
        minloglevel=2, num_threads=1, unk_id=0, bos_id=1, eos_id=2, **options,
    )  # fmt: skip
    path.with_name(path.name + ".model").rename(path)
    return path
