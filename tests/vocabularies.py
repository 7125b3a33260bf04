# SPDX-License-Identifier: Apache-2.0
"""The vocabularies of the tokenizer tests: third-party files with published vectors, and small ones."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from conftest import third_party
from slimrt.tokenizer.tokenizer import Tokenizer

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# No "<": what reads as a special token decodes as one, with SentencePiece's space before the text after it.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581"), max_size=60)
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@lru_cache
def opened(path: Path) -> Tokenizer:
    return Tokenizer(path)


def vocabulary(name: str) -> Tokenizer:
    return opened(third_party(f"tokenizers/ggml-vocab-{name}.gguf"))


def vectors(name: str) -> list[tuple[str, list[int]]]:
    path = third_party(f"tokenizers/ggml-vocab-{name}.gguf")
    inputs = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(inputs) == len(outputs) == 47
    return [(text, [int(id) for id in ids.split()]) for text, ids in zip(inputs, outputs, strict=True)]


def ggml(**fields) -> dict:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def sentencepiece_fields(**changes) -> dict:
    """A small SentencePiece vocabulary: every byte, some letters, and unions of them."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    unions = ["ab", "abc", "bc", "\u2581a", "\u2581ab", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "é\u2581", "ca"]
    pieces += [(text, -float(rank), NORMAL) for rank, text in enumerate(unions)]
    pieces += [(text, -float(100 + rank), NORMAL) for rank, text in enumerate("\u2581abcdé")]
    pieces += [("<|tool|>", 0.0, USER_DEFINED), ("<|im_end|>", 0.0, CONTROL)]
    tokens, scores, types = zip(*pieces, strict=True)
    fields = ggml(
        model="llama", tokens=list(tokens), scores=np.array(scores, np.float32), token_type=np.array(types, np.int32)
    )
    return fields | ggml(bos_token_id=1, eos_token_id=2, unknown_token_id=0) | ggml(**changes)


def byte_level_fields(**changes) -> dict:
    """A small byte-level BPE vocabulary: every byte, a few merges."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>", "<|im_end|>", "<|tool|>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    fields = ggml(model="gpt2", pre="gpt-2", tokens=tokens, merges=merges, token_type=np.array(types, np.int32))
    return fields | ggml(eos_token_id=tokens.index("<|endoftext|>")) | ggml(**changes)


SMALL = {
    "sentencepiece": Tokenizer.from_gguf_fields(sentencepiece_fields()),
    "byte-level": Tokenizer.from_gguf_fields(byte_level_fields()),
}
