"""slimrt and llama.cpp behind one face, for compare.py: sequences at a depth, decode steps, prefills.

An engine of either kind has

    fill(depth)        every sequence holds this many tokens; 0 means empty
    append(tokens, n)  the tokens to each of the first n sequences; the last logits are computed
    rewind(depth)      back to that length
    cache_bytes        bytes of cache a token takes, all layers
    close()

A depth beyond 512 tokens of one sequence is reached by tiling: the rows of a real prefill of 512 tokens, over and over.
How fast rows are read does not depend on what they hold. `real=True` computes every token instead, to check that.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import models
import numpy as np
from numpy.typing import NDArray

BASE = 512  # tokens of the real prefill that is tiled
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Load:
    """What one measurement needs of an engine."""

    path: str
    shape: models.Shape
    n_ctx: int
    n_seqs: int
    n_threads: int
    real: bool = False
    base: Path | None = None  # keeps the state after the real prefill for the next load of the same settings

    def tiles(self, depth: int) -> bool:
        """Several sequences are computed (one of them): llama.cpp can only be tiled in a buffer of one."""
        return depth > BASE and not self.real and self.n_seqs == 1


class Engine(Protocol):
    cache_bytes: float

    def fill(self, depth: int) -> None: ...
    def append(self, tokens: list[int], n: int) -> Logits: ...
    def rewind(self, depth: int) -> None: ...
    def close(self) -> None: ...


def prompt(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


class Slimrt:
    """settings: cache (mode), type, rank and residual_type (of k+r); the file has what the mode needs."""

    def __init__(self, load: Load, settings: dict[str, Any]):
        from slimrt import core, machine
        from slimrt.runtime.huge_pages import HugePages

        type = settings["type"]
        residual = {key: settings[key] for key in ("rank", "residual_type") if settings.get(key)}
        self._load = load
        file = core.GgufFile(load.path)
        machine.follow(machine.bytes_by_type(file), load.n_threads)  # as slimrt.Model does
        self._engine = core.Engine(
            file,
            n_ctx=load.n_ctx,
            n_seqs=load.n_seqs,
            n_threads=load.n_threads,
            cache=settings["cache"],
            cache_type_k=type,
            cache_type_v=type,
            **residual,
        )
        HugePages(file, load.n_threads).finish()  # as after some seconds
        self.cache_bytes = float(self._engine.memory()["cache_bytes_per_token"])
        self._sequences: list[int] = []

    def fill(self, depth: int) -> None:
        for sequence in self._sequences:
            self._engine.free_sequence(sequence)
        tiled = self._load.tiles(depth)
        base = self._load.base
        if base and base.exists():
            first = self._engine.load_sequence(np.load(base))
        else:
            first = self._engine.new_sequence()
            if depth:
                self._engine.append([(first, np.array(prompt(BASE if tiled else depth), np.int32))])
            if base:
                np.save(base, self._engine.save_sequence(first))
        self._sequences = [first]
        if tiled:
            self._engine.tile(first, depth)
        if self._load.n_seqs > 1:
            saved = self._engine.save_sequence(first)  # a fork would share the rows and read them from the caches
            self._sequences += [self._engine.load_sequence(saved) for _ in range(self._load.n_seqs - 1)]

    def append(self, tokens: list[int], n: int) -> Logits:
        given = np.array(tokens, np.int32)
        return self._engine.append([(sequence, given) for sequence in self._sequences[:n]])

    def rewind(self, depth: int) -> None:
        for sequence in self._sequences:
            self._engine.truncate(sequence, depth)

    def close(self) -> None:
        del self._engine


class Llama:
    """llama.cpp by its C interface. settings: type (of K and V), flash, n_ubatch, unified, repack."""

    _BYTES = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}

    def __init__(self, load: Load, settings: dict[str, Any]):
        import llama_cpp

        self._c, self._load = llama_cpp, load
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: llama.cpp calls it later
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = settings["repack"]
        self._model = llama_cpp.llama_model_load_from_file(load.path.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {load.path}")
        self._context = llama_cpp.llama_init_from_model(self._model, self._params(settings))
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {load.n_ctx} tokens with {settings}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max(BASE, load.n_seqs), 0, 1)
        self._lengths = [0] * load.n_seqs
        self.cache_bytes = 2 * load.shape.n_layers * load.shape.kv_width * self._BYTES[settings["type"]]

    def _params(self, settings: dict[str, Any]) -> Any:
        c, load = self._c, self._load
        params = c.llama_context_default_params()
        # one sequence: a second one in the same buffer, to tile with; its cells are given to the first
        several = load.n_seqs > 1
        unified = settings["unified"] if several else True
        sequence = -(-load.n_ctx // 256) * 256
        params.n_seq_max = load.n_seqs if several else 2
        params.n_ctx = sequence * load.n_seqs
        params.kv_unified = unified
        params.n_batch = BASE
        params.n_ubatch = settings["n_ubatch"]
        params.n_threads = params.n_threads_batch = load.n_threads
        params.type_k = params.type_v = int(gguf.GGMLQuantizationType[settings["type"].upper()])
        params.flash_attn_type = int(settings["flash"])
        return params

    def fill(self, depth: int) -> None:
        self._c.llama_memory_clear(self._memory, True)
        self._lengths = [0] * self._load.n_seqs
        tiled = self._load.tiles(depth)
        base = self._load.base
        if base and base.exists():
            self._restore(np.load(base), 0)
        else:
            tokens = prompt(BASE if tiled else depth)
            for first in range(0, len(tokens), BASE):
                self._decode({0: tokens[first : first + BASE]})
            if base:
                np.save(base, self._save())
        self._lengths[0] = depth
        if tiled:
            self._tile(depth)
        if depth and self._load.n_seqs > 1:
            saved = self._save()
            for other in range(1, self._load.n_seqs):
                self._restore(saved, other)
                self._lengths[other] = depth
        self._require(depth)

    def _save(self) -> NDArray[np.uint8]:
        size = self._c.llama_state_seq_get_size(self._context, 0)
        data = np.empty(size, np.uint8)
        if self._c.llama_state_seq_get_data(self._context, _bytes(data), size, 0) != size:
            raise RuntimeError("llama.cpp did not save the state of its sequence")
        return data

    def _restore(self, data: NDArray[np.uint8], sequence: int) -> None:
        if self._c.llama_state_seq_set_data(self._context, _bytes(data), data.size, sequence) != data.size:
            raise RuntimeError("llama.cpp did not take back its saved state")

    def _tile(self, depth: int) -> None:
        """Copies of sequence 0's state with later positions, loaded into sequence 1 and handed to sequence 0.

        A saved state begins: magic u32, sequence i32, streams u32, cells u32, then of each cell position i32,
        1 u32, sequence i32.
        """
        data, header = self._save(), 16
        if data[12:16].view(np.uint32)[0] != BASE:
            raise RuntimeError("llama.cpp's saved state is not laid out as expected")
        cells = data[header : header + 12 * BASE].view(np.int32).reshape(BASE, 3)
        if not (np.array_equal(cells[:, 0], np.arange(BASE)) and (cells[:, 1] == 1).all()):
            raise RuntimeError("llama.cpp's saved state is not laid out as expected")
        for first in range(BASE, depth, BASE):
            cells[:, 0] = np.arange(first, first + BASE)
            self._restore(data, 1)  # drops what was there before from sequence 1; sequence 0 keeps it
            self._c.llama_memory_seq_cp(self._memory, 1, 0, -1, -1)
        self._c.llama_memory_seq_rm(self._memory, 1, -1, -1)

    def _require(self, depth: int) -> None:
        for sequence in range(self._load.n_seqs):
            last = self._c.llama_memory_seq_pos_max(self._memory, sequence)
            if last != depth - 1:
                raise RuntimeError(f"llama.cpp's sequence {sequence} ends at {last}, not at {depth - 1}")

    def append(self, tokens: list[int], n: int) -> Logits:
        for first in range(0, len(tokens), BASE):
            self._decode({sequence: tokens[first : first + BASE] for sequence in range(n)})
        n_vocab = self._load.shape.n_vocab
        rows = [self._c.llama_get_logits_ith(self._context, i - n) for i in range(n)]
        return np.stack([np.ctypeslib.as_array(row, (n_vocab,)) for row in rows])

    def _decode(self, items: dict[int, list[int]]) -> None:
        batch, at = self._batch, 0
        for sequence, tokens in items.items():
            for i, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, self._lengths[sequence] + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = i == len(tokens) - 1
                at += 1
            self._lengths[sequence] += len(tokens)
        batch.n_tokens = at
        if self._c.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama.cpp could not decode {at} tokens after {self._lengths}")

    def rewind(self, depth: int) -> None:
        for sequence in range(self._load.n_seqs):
            self._c.llama_memory_seq_rm(self._memory, sequence, depth, -1)
            self._lengths[sequence] = min(self._lengths[sequence], depth)

    def close(self) -> None:
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


ENGINES = {"slimrt": Slimrt, "llama.cpp": Llama}
