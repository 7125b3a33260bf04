# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of a Hugging Face model goes in GGUF, and how its elements are turned on the way."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, quants

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import F32, Tensor
from slimrt.modelfile.hf.config import Config, Sizes
from slimrt.modelfile.hf.family import ALWAYS, Source, Stack
from slimrt.modelfile.hf.safetensors_files import DTYPES, Entry, as_float32, as_stored

# What an Entry's dtype becomes: safetensors' names, and those of GGML's quantised types. Of integers no weight is made:
# computed buffers, such as masks, may be of these.
TYPES = {kind.name: kind for kind in GGMLQuantizationType if not re.fullmatch(r"I\d+", kind.name)} | {"F64": F32}


@dataclass(frozen=True)
class _Module:
    """A weight, and its bias if it has one.

    Attributes:
        name, theirs: GGUF's and the source's name of it, without "weight" or "bias".
        only: "weight" or "bias" where it is a tensor by itself, which `theirs` names as it is; "": it is not.
        shape: of the weight in the source, but for `transposed` and `half`.
        transposed: the weight is stored the other way round.
        half: which half of the source's rows it is; None: all.
        experts: of how many it is the weights, one upon the other; `theirs` has a place for their number. 0: of none.
    """

    name: str
    theirs: str
    shape: tuple[int, ...]
    transposed: bool = False
    half: int | None = None
    experts: int = 0
    only: str = ""

    def parts(self, biased: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Shapes of what is stored as "weight" and "bias"."""
        if self.only:
            return {self.only: self.shape}
        return {"weight": self.shape, **({"bias": self.shape[:1]} if self.among(biased) else {})}

    def sources(self, part: str) -> list[str]:
        """The source's names of what is stored as "weight" or "bias"."""
        if self.only:
            return [self.theirs]
        return [f"{self.theirs.format(expert)}.{part}" for expert in range(self.experts or 1)]

    @property
    def part(self) -> str:
        return self.name.rpartition(".")[2]

    def among(self, names: Collection[str]) -> bool:
        return self.name in names or self.part in names


class Layout:
    """Finds each tensor that the family names, and refuses the others."""

    def __init__(self, config: Config, sizes: Sizes, checkpoint: Source):
        self.config, self.family, self.sizes, self.checkpoint = config, config.family, sizes, checkpoint
        named = any(name.startswith(self.family.stem) for name in checkpoint.entries)
        self.stem = self.family.stem if named else ""  # a bare model: GPT2Model instead of GPT2LMHeadModel
        self.head, self.head_bias = f"{self.family.head}.weight", f"{self.family.head}.bias"
        flags = {key: key == ALWAYS or bool(config.get(key)) for key in self.family.biases}
        self.biased = {module for key, modules in self.family.biases.items() if flags[key] for module in modules}
        names = (self.family.outside["token_embd"][0], *self.family.copies)
        self.embeddings = [name for name in (f"{self.stem}{theirs}.weight" for theirs in names) if self._has(name)]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the model, in GGUF's order.

        Raises:
            ModelFormatError: one is missing, of a wrong shape, or should be another's copy and is not.
            UnsupportedError: the files hold one that the family does not have, or one of a type that is not read.
        """
        used = {self.head, *self.embeddings}
        for copy in self.embeddings[1:]:
            if not self._equal(copy, self.embeddings[0]):
                raise ModelFormatError(f"{self.config.where}: {copy} differs from {self.embeddings[0]}")
        for module in self._modules():
            for part, dims in module.parts(self.biased).items():
                used.update(module.sources(part))
                yield self._tensor(module, part, dims)
        yield from self._head()
        if "output" in self.biased:
            used.add(self.head_bias)
            yield self._tensor(_Module("output", self.family.head, ()), "bias", self.sizes.shape("v"))
        for name in sorted(self.checkpoint.entries.keys() - used):
            if not any(re.fullmatch(pattern, name) for pattern in self.family.ignored):
                raise UnsupportedError(
                    f"{self.config.where}: tensor '{name}' has no place in model type "
                    f"'{self.config.model_type}'; leaving it out would change the model"
                )

    def _has(self, name: str) -> bool:
        return name in self.checkpoint.entries

    def _equal(self, name: str, other: str) -> bool:
        return np.array_equal(self.checkpoint.elements(name), self.checkpoint.elements(other))

    def _modules(self) -> Iterator[_Module]:
        for name, (theirs, symbols) in self.family.outside.items():
            stored = f"{self.stem}{theirs}"
            if name == "token_embd" and self.embeddings:
                stored = self.embeddings[0].removesuffix(".weight")
            yield _Module(name, stored, self.sizes.shape(symbols))
        for stack in self.family.stacks:
            for layer in range(self.config.layers(stack)):
                prefix, theirs = stack.prefix.format(layer), self.stem + stack.block.format(layer)
                for name, (module, symbols) in self._layer(stack, layer).items():
                    if (layer == 0 or name not in stack.only_first) and not self._lacks(layer, name):
                        half, shape = stack.halves.get(name), self.sizes.in_layer(layer).shape(symbols)
                        experts = self.sizes.others["experts"] if "{}" in module else 0
                        name, _, only = name.partition(".")
                        yield _Module(prefix + name, theirs + module, shape, self.family.conv1d, half, experts, only)

    def _layer(self, stack: Stack, layer: int) -> Mapping[str, tuple[str, str]]:
        leading = self.config.number(self.family.leading) if self.family.leading else 0
        return self.family.leading_layer if layer < leading else stack.layer

    def _lacks(self, layer: int, name: str) -> bool:
        """Whether a layer does not have a module: K or V of one that reads another's, or as the family says."""
        owners = self.config.owners
        reads = owners is not None and owners[layer] != layer and name in ("attn_k", "attn_v")
        return reads or layer in self.family.lacking.get(name, ())

    def _head(self) -> Iterator[Tensor]:
        """The output matrix, unless it is the token embedding."""
        embedding = self.embeddings[0] if self.embeddings else ""
        if not self.family.head:
            return
        tied, stored = bool(self.config.get("tie_word_embeddings", False)), self._has(self.head)
        differs = stored and not (embedding and self._equal(self.head, embedding))
        if self.family.head_decides:
            tied = not differs
        if not tied:
            source = embedding if self.family.head_or_embedding and not stored else self.head
            module = _Module("output", source.removesuffix(".weight"), ())
            yield self._tensor(module, "weight", self.sizes.shape("v d"))
        elif differs:
            raise ModelFormatError(
                f"{self.config.path}: tie_word_embeddings is true, but {self.head} differs from {embedding}"
            )

    def _tensor(self, module: _Module, part: str, shape: tuple[int, ...]) -> Tensor:
        names = module.sources(part)
        if module.experts:
            return self._stacked(module, names, part, shape)
        theirs = names[0]
        entry = self._entry(theirs)
        transposed = module.transposed and len(shape) == 2
        stored = shape[::-1] if transposed else shape
        axis = max(0, len(shape) - 2)  # of experts, the rows of each
        if module.half is not None:
            stored = (*stored[:axis], 2 * stored[axis], *stored[axis + 1 :])
        of_latent = module.part in self.family.latent_parts
        if of_latent:
            stored = self.sizes.shape("kvb lat")
        unused = self.family.unused_rows.get(module.part, 0)
        if unused:
            stored = (stored[0] + unused, *stored[1:])
        if entry.shape != stored:
            raise ModelFormatError(f"{entry.file}: tensor '{theirs}' is {list(entry.shape)}, expected {list(stored)}")
        convolution = len(shape) > 2 and module.among(self.family.convolutions)
        if convolution:
            shape = (shape[0], shape[1] * shape[2])
        small = len(shape) == 1 or part == "bias" or module.among(self.family.float32)
        kind = F32 if small else TYPES[entry.dtype]
        n_heads = {"attn_q": self.sizes.n_heads, "attn_k": self.sizes.n_kv_heads}.get(module.part, 1)

        def load() -> np.ndarray:
            elements = self.checkpoint.elements(theirs)[unused:]
            if module.half is not None:
                elements = np.split(elements, 2, axis)[module.half]
            if transposed:
                elements = elements.T
            if of_latent:
                elements = part_of_latent(elements, shape, is_v=module.part == self.family.latent_parts[1])
            if convolution:
                elements = elements.swapaxes(1, 2).reshape(shape)
            if module.part in self.family.permuted:
                elements = interleave_pairs(elements, n_heads)
            if module.part in self.family.by_head:
                elements = parts_in_order(elements, self.sizes.n_heads)
            if part == "weight" and module.part in self.family.ternary:
                elements = as_ternary(elements, entry.dtype)
            stored = _bytes(elements, entry.dtype, kind)
            if self.family.norms_less_one and module.part.endswith("norm"):
                stored = (stored.view(np.float32) + 1).view(np.uint8)
            return stored

        return Tensor(f"{module.name}.{part}", shape, kind, load)

    def _stacked(self, module: _Module, names: list[str], part: str, shape: tuple[int, ...]) -> Tensor:
        """The weights of all experts [experts, *shape]."""
        entries = [self._entry(name) for name in names]
        for name, entry in zip(names, entries, strict=True):
            if entry.shape != shape or entry.dtype != entries[0].dtype:
                raise ModelFormatError(
                    f"{entry.file}: tensor '{name}' is {entry.dtype} {list(entry.shape)}, expected "
                    f"{entries[0].dtype} {list(shape)}"
                )
        dtype, kind = entries[0].dtype, TYPES[entries[0].dtype]

        def load() -> np.ndarray:
            return _bytes(np.stack([self.checkpoint.elements(name) for name in names]), dtype, kind)

        return Tensor(f"{module.name}.{part}", (len(names), *shape), kind, load)

    def _entry(self, name: str) -> Entry:
        if not self._has(name):
            raise ModelFormatError(f"{self.config.where}: tensor '{name}' is missing")
        entry = self.checkpoint.entries[name]
        if entry.dtype not in TYPES:
            raise UnsupportedError(
                f"{entry.file}: tensor '{name}' is {entry.dtype}; slimrt converts {', '.join(DTYPES)}"
            )
        return entry


def interleave_pairs(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder the rows of W_Q or W_K (or their biases) [n_heads * head_dim, ...] as GGUF's "llama" wants them.

    Hugging Face rotates dimension i of a head together with i + head_dim / 2, llama.cpp neighbours.
    """
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def parts_in_order(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows [n_heads * 3 * head_dim, ...], in each head q | k | v, to q of all heads, then k, then v."""
    heads = rows.reshape(n_heads, 3, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def part_of_latent(rows: np.ndarray, shape: tuple[int, ...], *, is_v: bool) -> np.ndarray:
    """Of rows [n_heads * (K's and V's columns), latent], in each head K's, then V's: one of them [n_heads, ...].

    V's as they are, K's turned, so that they take a query to the latent.
    """
    heads = rows.reshape(shape[0], -1, rows.shape[1])
    return heads[:, -shape[1] :] if is_v else heads[:, : shape[2]].swapaxes(1, 2)


def as_ternary(elements: np.ndarray, dtype: str) -> np.ndarray:
    """What BitNet b1.58 multiplies with (Ma et al., 2024): -s, 0 or s, s the mean size, in the elements' own type.

    Its own code also rounds activations to 8 bits; that is no part of the weights, and left out as llama.cpp does.
    """
    values = as_float32(elements, dtype)
    scale = max(float(np.abs(values, dtype=np.float64).mean()), 1e-5)
    return as_stored((np.clip(np.rint(values / scale), -1, 1) * scale).astype(np.float32), dtype)


def _bytes(elements: np.ndarray, dtype: str, kind: GGMLQuantizationType) -> np.ndarray:
    """The stored bytes of elements in their own type, or widened to float32."""
    if dtype != "F64" and TYPES[dtype] == kind:
        return np.ascontiguousarray(elements).view(np.uint8)
    if dtype not in DTYPES:
        return np.ascontiguousarray(quants.dequantize(elements, TYPES[dtype])).view(np.uint8)
    assert kind == F32 and elements.dtype == DTYPES[dtype]
    return np.ascontiguousarray(as_float32(elements, dtype)).view(np.uint8)
