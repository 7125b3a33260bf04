# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine that keeps sequences and lets a function say the logits, and models made with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

import slimrt
from gguf_shapes import finish
from slimrt import core
from slimrt.generation.loop import Loop
from slimrt.generation.sequences import Sequences
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.numbers import log_normaliser
from slimrt.runtime.runtime import Runtime
from slimrt.tokenizer.tokenizer import Tokenizer
from vocabularies import ggml

Next = Callable[[object, list[int]], np.ndarray]

CONTROLS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
            "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")  # fmt: skip
END, START, EN, DE, TRANSLATE, TRANSCRIBE, LM, PREVIOUS, NO_SPEECH, NO_TIMES = range(257, 267)
TIME = 267  # <|0.00|>
N_VOCAB = TIME + 1501


class ScriptedEngine:
    """Sequences of tokens over a source. next_logits(source, tokens): the row after these tokens.

    Attributes:
        live: sequence to [source, tokens]. encodes, appends: items of each call. most: sequences alive at once.
    """

    def __init__(self, next_logits: Next, **info):
        self._next = next_logits
        self._info = {
            "n_seqs": 1,
            "n_layers": 1,
            "n_heads": 2,
            "n_ctx": 448,
            "cache_tokens": info.get("n_ctx", 448) * info.get("n_seqs", 1),
            "n_batch": 512,
            "sparse_threshold": 0.0,
            "sparse_delta": 0.0,
            "layers": [],
            "architecture": "scripted",
        } | info
        self.live: dict[int, list] = {}
        self.encodes: list[int] = []
        self.appends: list[int] = []
        self.most = self._count = 0

    def info(self) -> dict:
        return self._info

    def can_truncate(self, sequence: int, length: int) -> bool:
        return True  # no windows

    def new_sequence(self) -> int:
        return self._add([None, []])

    def _add(self, state: list) -> int:
        self._count += 1
        self.live[self._count] = state
        self.most = max(self.most, len(self.live))
        return self._count

    def free_sequence(self, sequence: int) -> None:
        del self.live[sequence]

    def fork(self, sequence: int) -> int:
        source, tokens = self.live[sequence]
        return self._add([source, list(tokens)])

    def truncate(self, sequence: int, length: int) -> None:
        assert length <= len(self.live[sequence][1])
        del self.live[sequence][1][length:]

    def length(self, sequence: int) -> int:
        return len(self.live[sequence][1])

    def encode(self, items, *, states=False) -> None:
        self.encodes.append(len(items))
        for sequence, source, *positions in items:
            assert self.live[sequence] == [None, []]
            assert isinstance(source, np.ndarray) and source.flags.c_contiguous
            for one in positions:
                assert one.dtype == np.int32 and one.shape == source.shape[:1] and (np.diff(one) > 0).all()
            self.live[sequence][0] = source

    def has_room(self, growth) -> bool:
        return True

    def append(self, items, *, outputs=None, states=False, on_progress=None) -> np.ndarray:
        self.appends.append(len(items))
        assert len({sequence for sequence, _ in items}) == len(items)
        rows = []
        for sequence, tokens in items:
            assert tokens.dtype == np.int32
            source, held = self.live[sequence]
            assert source is not None, "append to a sequence without a source"
            held += [int(token) for token in tokens]
            assert len(held) <= self._info["n_ctx"]
            rows.append(np.array(self._next(source, list(held)), np.float32))
        return np.stack(rows)

    def sample(self, logits, samplers, *, masks=None, logprobs=None, joint_from=None) -> list:
        """One after the other."""
        chosen = []
        for i, (row, sampler, n) in enumerate(zip(logits, samplers, logprobs, strict=True)):
            if joint_from[i] >= 0:
                row = joint(row, masks[i], joint_from[i])
            token = sampler.sample(row, None if masks is None else masks[i])
            chosen.append((token, core.token_logprobs(row, token, n) if n else None))
        return chosen

    def log_normalisers(self, logits) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.array([-np.inf if row.max() == -np.inf else log_normaliser(row) for row in logits])

    def likeliest(self, logits, count) -> np.ndarray:
        ids = np.argsort(-logits, axis=-1, kind="stable")[:, :count].astype(np.int32)
        return np.where(np.take_along_axis(logits, ids, axis=-1) > -np.inf, ids, -1)


def joint(row: np.ndarray, mask: np.ndarray, start: int) -> np.ndarray:
    """A row of logits (vocab,) without what the mask rules out, nor what comes before `start` where all of what comes
    from there on is likelier together than the likeliest of it."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(row)].astype(bool)
    left = np.where(allowed, row, -np.inf).astype(np.float32)
    with np.errstate(divide="ignore"):
        if np.log(np.exp(left[start:].astype(np.float64)).sum()) > left[:start].max(initial=-np.inf):
            left[:start] = -np.inf
    return left


def run(engine: ScriptedEngine, tasks, width: int) -> list:
    """The results of (sequences that it needs, task)s, which use at most `width` sequences at once."""
    return Loop(Sequences(Runtime(None, engine, show_progress=False)), width).run(tasks)


def write_gguf(path: Path, architecture: str, fields: dict, tensors: dict | None = None) -> Path:
    """A GGUF file with this metadata (str, bool, int, float, lists of these) and these tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, (list, np.ndarray)):
            writer.add_array(key, [x.item() if isinstance(x, np.generic) else x for x in value])
        else:
            kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32}
            kinds[type(value)](key, value)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    return finish(writer, path)


def scripted_model(path: Path, engine: ScriptedEngine) -> slimrt.Model:
    """A Model over this engine, with the tokenizer and metadata of a GGUF file."""
    model = slimrt.Model.__new__(slimrt.Model)
    model._runtime = Runtime(ModelSource(path), engine, show_progress=False)
    model._seeds = random.Random(0)
    return model


def whisper_fields() -> dict:
    """A vocabulary in Whisper's order: bytes and a merge, controls, times."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    times = [f"<|{i / 50:.2f}|>" for i in range(1501)]
    tokens = [alphabet[byte] for byte in range(256)] + ["er"] + list(CONTROLS) + times
    types = [1] * 257 + [3] * (len(CONTROLS) + len(times))
    return ggml(model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=["e r"], eos_token_id=END,
                bos_token_id=END, add_bos_token=False)  # fmt: skip


def whisper_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf_fields({"general.architecture": "whisper"} | whisper_fields())


def whisper_file(path: Path) -> Path:
    own = {"slimrt.whisper.suppress_tokens": [ord("#")], "slimrt.whisper.begin_suppress_tokens": [ord(" "), END],
           "slimrt.whisper.alignment_heads": [0, 0, 0, 1]}  # fmt: skip
    return write_gguf(path, "whisper", whisper_fields() | own)


def said(text: str) -> list[int]:
    """The ids of a text, a byte each."""
    return list(text.encode())


def at(seconds: float) -> int:
    """The id of a time."""
    return TIME + round(seconds * 50)


def after_instructions(tokens: list[int]) -> list[int] | None:
    """What was said so far in a window; None before the instructions are complete."""
    start = tokens.index(START)
    for i in range(start, len(tokens)):
        if tokens[i] in (TRANSCRIBE, TRANSLATE):
            rest = tokens[i + 1 :]
            return rest[1:] if rest[:1] == [NO_TIMES] else rest
    return None


def likely(token: int, logit: float = 20.0, n_vocab: int = N_VOCAB) -> np.ndarray:
    row = np.zeros(n_vocab, np.float32)
    row[token] = logit
    return row
