# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory (config.json, safetensors, tokenizer) as GGUF metadata and tensors.

Nothing is guessed: a tensor that the family does not name, a config value that changes the mathematics and is not
handled, a missing tensor or a wrong shape are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import LlamaFileType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError, UnsupportedError

from .families import ALWAYS, FAMILIES, GELU, Family
from .gguf_file import F32, ModelData, Tensor, boolean, float32, string, uint32
from .rope import rope_fields
from .safetensors_files import DTYPES, Checkpoint, Entry, read_json
from .vocabulary import vocabulary_fields

_TYPES = {
    "F64": GGMLQuantizationType.F32,
    "F32": GGMLQuantizationType.F32,
    "F16": GGMLQuantizationType.F16,
    "BF16": GGMLQuantizationType.BF16,
}
_FILE_TYPES = {"F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16}


class Config:
    """config.json, in the usual spelling of its keys.

    Raises:
        ModelFormatError: it is missing or broken.
        UnsupportedError: another model type, or a value that slimrt does not handle.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise ModelFormatError(f"{path.parent} is not a model: it has no config.json")
        self.path, values = path, read_json(path)
        self.model_type = str(values.get("model_type"))
        if self.model_type not in FAMILIES:
            raise UnsupportedError(
                f"{path}: model type {self.model_type!r} is not supported; supported are: {', '.join(FAMILIES)}"
            )
        self.family: Family = FAMILIES[self.model_type]
        usual = {theirs: ours for ours, theirs in self.family.spelling.items()}
        self.values = {**self.family.defaults, **{usual.get(key, key): value for key, value in values.items()}}
        self._refuse()

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; a missing or null one is `default`, ModelFormatError without that."""
        return int(self._number(key, default, int, 1))

    def number(self, key: str) -> float:
        """A number that is not negative; ModelFormatError for anything else."""
        return float(self._number(key, None, int | float, 0))

    def _number(self, key: str, default: int | None, kind: Any, low: int) -> Any:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value < 2**31:
            raise ModelFormatError(f"{self.path}: {self.family.spelling.get(key, key)} is {value!r}, not a size")
        return value

    def _refuse(self) -> None:
        if method := self.get("quantization_config"):
            method = method.get("quant_method") if isinstance(method, dict) else method
            raise UnsupportedError(f"{self.path}: weights quantised by {method!r}; convert the unquantised model")
        for key, allowed in self.family.only.items():
            if self.get(key) is not None and self.get(key) not in allowed:
                raise UnsupportedError(
                    f"{self.path}: {key} = {self.get(key)!r} is not supported for model type '{self.model_type}'; "
                    f"supported: {', '.join(map(str, allowed))}"
                )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, in elements."""

    d: int
    ff: int
    v: int
    ctx: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Config) -> Sizes:
        d, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
        n_kv_heads = config.size("num_key_value_heads", n_heads)
        if config.get("head_dim") is None and d % n_heads or n_heads % n_kv_heads:
            raise ModelFormatError(
                f"{config.path}: {n_heads} query heads and {n_kv_heads} key heads do not divide a width of {d}"
            )
        return cls(
            d=d,
            ff=config.size("intermediate_size", 4 * d if config.family.arch == "gpt2" else None),
            v=config.size("vocab_size"),
            ctx=config.size("max_position_embeddings"),
            n_layers=config.size("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=config.size("head_dim", d // n_heads),
        )

    def shape(self, symbols: str) -> tuple[int, ...]:
        """The shape that a family's table writes in symbols."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        known = {"d": self.d, "q": q, "kv": kv, "qkv": q + 2 * kv, "ff": self.ff, "2ff": 2 * self.ff, "v": self.v}
        known["ctx"] = self.ctx
        return tuple(known[symbol] for symbol in symbols.split())


def read_hf(directory: Path) -> tuple[ModelData, list[str]]:
    """Return the model in a Hugging Face directory, and warnings; tensor data stays on disk until asked for.

    Raises:
        ModelFormatError: a file is missing, broken, or contradicts config.json.
        UnsupportedError: an unknown model type, or something that changes the mathematics and is not handled.
    """
    config = Config(directory / "config.json")
    sizes, checkpoint = Sizes.of(config), Checkpoint(directory)
    metadata = _metadata(config, sizes, directory.resolve().name)
    tensors = list(_Layout(config, sizes, checkpoint).tensors())
    if config.family.rope:
        rope, more = rope_fields(config.values, sizes.head_dim, config.family.rope_aliases)
        metadata |= {f"{config.family.arch}.{key}": value for key, value in rope.items()}
        tensors += more
    largest = max(tensors, key=lambda tensor: np.prod(tensor.shape))
    metadata["general.file_type"] = uint32(int(_FILE_TYPES.get(largest.type.name, LlamaFileType.ALL_F32)))
    vocabulary, warnings = vocabulary_fields(directory, config.family.arch, sizes.v)
    return ModelData(metadata | vocabulary, {tensor.name: tensor for tensor in tensors}), warnings


def _metadata(config: Config, sizes: Sizes, name: str) -> dict[str, GGUFValue]:
    arch = config.family.arch
    eps_key, eps = config.family.norm_eps
    fields = {
        "context_length": uint32(sizes.ctx),
        "embedding_length": uint32(sizes.d),
        "block_count": uint32(sizes.n_layers),
        "feed_forward_length": uint32(sizes.ff),
        "attention.head_count": uint32(sizes.n_heads),
        "attention.head_count_kv": uint32(sizes.n_kv_heads),
        f"attention.{eps_key}": float32(config.number(eps)),
        "vocab_size": uint32(sizes.v),
    }
    if sizes.head_dim * sizes.n_heads != sizes.d:
        fields |= {f"attention.{part}_length": uint32(sizes.head_dim) for part in ("key", "value")}
    if window := _window(config, sizes):
        fields["attention.sliding_window"] = uint32(window)
    general = {"architecture": string(arch), "type": string("model"), "name": string(name)}
    metadata = {f"general.{key}": value for key, value in general.items()}
    metadata |= {f"{arch}.{key}": value for key, value in fields.items()}
    metadata |= {f"{arch}.{flag}": boolean(bool(config.get(flag))) for flag in config.family.flags}
    if key := config.family.activation:
        metadata["slimrt.activation"] = string(GELU[config.get(key) or config.family.defaults[key]])
    return metadata


def _window(config: Config, sizes: Sizes) -> int | None:
    """The sliding window of every layer, None when there is none or it is wider than the context.

    Raises:
        UnsupportedError: only some layers have it, or the runtime cannot honour it in this family.
    """
    if config.family.window is None or not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return None
    window = config.size("sliding_window")
    first = config.number("max_window_layers") if config.get("max_window_layers") else 0
    sliding = [i >= first for i in range(sizes.n_layers)]
    if isinstance(kinds := config.get("layer_types"), list):
        sliding = [kind == "sliding_attention" for kind in kinds]
    if window >= sizes.ctx or not any(sliding):
        return None
    if not all(sliding):
        raise UnsupportedError(
            f"{config.path}: a sliding window in {sum(sliding)} of {sizes.n_layers} layers is not supported"
        )
    if not config.family.window:
        raise UnsupportedError(
            f"{config.path}: use_sliding_window is not supported for model type '{config.model_type}'"
        )
    return window


class _Layout:
    """Finds each tensor that the family names, and refuses the others."""

    def __init__(self, config: Config, sizes: Sizes, checkpoint: Checkpoint):
        self.config, self.family, self.sizes, self.checkpoint = config, config.family, sizes, checkpoint
        named = any(name.startswith(self.family.stem) for name in checkpoint.entries)
        self.stem = self.family.stem if named else ""  # a bare model: GPT2Model instead of GPT2LMHeadModel
        self.head, self.head_bias = f"{self.family.head}.weight", f"{self.family.head}.bias"
        flags = {key: key == ALWAYS or bool(config.get(key)) for key in self.family.biases}
        self.biased = {module for key, modules in self.family.biases.items() if flags[key] for module in modules}

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the model, in GGUF's order.

        Raises:
            ModelFormatError: one is missing or of a wrong shape.
            UnsupportedError: the files hold one that the family does not have.
        """
        used = {self.head}
        for module, theirs, shape, in_layer in self._modules():
            for part, dims in {"weight": shape, "bias": shape[:1]}.items():
                if part == "weight" or module.rpartition(".")[2] in self.biased:
                    used.add(f"{theirs}.{part}")
                    yield self._tensor(f"{module}.{part}", f"{theirs}.{part}", dims, in_layer)
        yield from self._head()
        if "output" in self.biased:
            used.add(self.head_bias)
            yield self._tensor("output.bias", self.head_bias, self.sizes.shape("v"), False)
        for name in sorted(self.checkpoint.entries.keys() - used):
            if not any(re.fullmatch(pattern, name) for pattern in self.family.ignored):
                raise UnsupportedError(
                    f"{self.config.path.parent}: tensor '{name}' has no place in model type "
                    f"'{self.config.model_type}'; leaving it out would change the model"
                )

    def _modules(self) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
        """GGUF module, Hugging Face module, shape of the weight, whether it is in a layer."""
        for module, (theirs, symbols) in self.family.outside.items():
            yield module, self.stem + theirs, self.sizes.shape(symbols), False
        for layer in range(self.sizes.n_layers):
            prefix = self.stem + self.family.block.format(layer)
            for module, (theirs, symbols) in self.family.layer.items():
                yield f"blk.{layer}.{module}", prefix + theirs, self.sizes.shape(symbols), True

    def _head(self) -> Iterator[Tensor]:
        """The output matrix, unless it is the token embedding."""
        if not self.config.get("tie_word_embeddings", False):
            yield self._tensor("output.weight", self.head, self.sizes.shape("v d"), False)
        elif self.head in self.checkpoint.entries:
            embedding = self.stem + self.family.outside["token_embd"][0] + ".weight"
            if not np.array_equal(self.checkpoint.elements(self.head), self.checkpoint.elements(embedding)):
                raise ModelFormatError(
                    f"{self.config.path}: tie_word_embeddings is true, but {self.head} differs from {embedding}"
                )

    def _tensor(self, name: str, theirs: str, shape: tuple[int, ...], in_layer: bool) -> Tensor:
        entry = self._entry(theirs)
        transposed = self.family.conv1d and in_layer and len(shape) == 2
        stored = shape[::-1] if transposed else shape
        if entry.shape != stored:
            raise ModelFormatError(f"{entry.file}: tensor '{theirs}' is {list(entry.shape)}, expected {list(stored)}")
        flat = len(shape) == 1 or name == "position_embd.weight"  # small, and never multiplied as a matrix
        kind = F32 if flat else _TYPES[entry.dtype]
        module = name.split(".")[-2]
        n_heads = {"attn_q": self.sizes.n_heads, "attn_k": self.sizes.n_kv_heads}.get(module, 1)

        def load() -> np.ndarray:
            elements = self.checkpoint.elements(theirs)
            if transposed:
                elements = elements.T
            if module in self.family.permuted:
                elements = interleave_pairs(elements, n_heads)
            if module in self.family.by_head:
                elements = parts_in_order(elements, self.sizes.n_heads)
            return _bytes(elements, entry.dtype, kind)

        return Tensor(name, shape, kind, load)

    def _entry(self, name: str) -> Entry:
        if name not in self.checkpoint.entries:
            raise ModelFormatError(f"{self.config.path.parent}: tensor '{name}' is missing")
        return self.checkpoint.entries[name]


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


def _bytes(elements: np.ndarray, dtype: str, kind: GGMLQuantizationType) -> np.ndarray:
    """The stored bytes of elements in their own type, or widened to float32."""
    if dtype != "F64" and _TYPES[dtype] == kind:
        return np.ascontiguousarray(elements).view(np.uint8)
    assert kind == F32 and elements.dtype == DTYPES[dtype]
    wide = (elements.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else elements.astype(np.float32)
    return np.ascontiguousarray(wide).view(np.uint8)
