# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face config.json says of a model, and the sizes that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.bart_families import BART_FAMILIES
from slimrt.modelfile.hf.chronos2 import CLASSES
from slimrt.modelfile.hf.encoder_decoders import ENCODER_DECODERS
from slimrt.modelfile.hf.experts import EXPERTS
from slimrt.modelfile.hf.families import FAMILIES
from slimrt.modelfile.hf.family import Family, Stack
from slimrt.modelfile.hf.gpt_families import GPT_FAMILIES
from slimrt.modelfile.hf.latent import LATENT
from slimrt.modelfile.hf.layered_families import LAYERED_FAMILIES
from slimrt.modelfile.hf.llama_families import LLAMA_FAMILIES, OWN_CLASSES
from slimrt.modelfile.hf.multimodal import WRAPPERS, text_config
from slimrt.modelfile.sharing import SHARING
from slimrt.tokenizer.hf import read_json, read_json_if_any

_MODEL_TYPES = {
    **FAMILIES,
    **LLAMA_FAMILIES,
    **LAYERED_FAMILIES,
    **GPT_FAMILIES,
    **EXPERTS,
    **LATENT,
    **ENCODER_DECODERS,
    **BART_FAMILIES,
}
_OF_ROPE = ("rope_theta", "partial_rotary_factor")
_CLASSES = {**OWN_CLASSES, **CLASSES}  # which are not what their model type says


@contextmanager
def values_of(path: Path) -> Iterator[None]:
    """Makes a ModelFormatError of what values of a wrong kind lead to: a number where there should be a list, ..."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelFormatError(f"{path}: a value in it is not what it should be: {error}") from error


class Config:
    """A model's config, in the usual spelling of its keys.

    Args:
        path: the file that the values are from.
        values: config.json's, as they are.
        generation: generation_config.json's.
        family: how the model is laid out; None: as Hugging Face has its model type.

    Attributes:
        where: what holds the model's tensors, for messages.
        owners: the layer whose K and V each layer reads; None where each reads its own.
        wrapped_in: the model type around this text model; "": it is alone.

    Raises:
        ModelFormatError: a value is broken, or contradicts another.
        UnsupportedError: another model type, or a value that slimrt does not handle.
    """

    wrapped_in = ""

    def __init__(self, path: Path, values: dict[str, Any], generation: dict[str, Any], family: Family | None = None):
        self.path, self.generation = path, generation
        self.where = path.parent if path.suffix == ".json" else path
        self.model_type = str(values.get("model_type"))
        with values_of(path):
            classes = values.get("architectures") or ()
            family = family or next((_CLASSES[one] for one in classes if one in _CLASSES), None)
        if family is None and self.model_type not in _MODEL_TYPES:
            why = core.why_refused(self.model_type)
            raise UnsupportedError(
                f"{path}: model type {self.model_type!r} is not supported{why and ': '}{why}; "
                f"supported are: {', '.join(_MODEL_TYPES)}; "
                f"the text part of: {', '.join(WRAPPERS)}"
            )
        self.family: Family = family or _MODEL_TYPES[self.model_type]
        usual = {theirs: ours for ours, theirs in self.family.spelling.items()}
        generated = (*self.family.numbers, *self.family.of_generation, "bad_words_ids")
        said = {key: generation[key] for key in generated if generation.get(key) is not None}
        # In its own spelling a key counts more, since transformers writes some twice; RoPE's are read in that alone.
        own = {usual[key]: value for key, value in values.items() if key in usual}
        read = {key: value for key, value in values.items() if not (key in _OF_ROPE and key in self.family.spelling)}
        self.values = {**self.family.defaults, **read, **own, **said}
        with values_of(path):
            self._refuse()
            if self.family.settle is not None:
                self.family, self.values = self.family.settle(self.family, self.values)
        self.owners = self._owners()

    @classmethod
    def of(cls, directory: Path) -> Config:
        """Of a Hugging Face directory. ModelFormatError: it has no config.json, or a broken one."""
        path, beside = directory / "config.json", directory / "generation_config.json"
        if not path.is_file():
            files = sorted(one.name for one in Path(directory).glob("*.gguf"))
            hint = f", but {', '.join(files)}: name the file itself" if files else ""
            if (directory / "adapter_config.json").is_file():
                hint = f", but an adapter: slimrt convert MODEL --lora {directory} -o OUT merges it into its model"
            raise ModelFormatError(f"{directory} is not a model: it has no config.json{hint}")
        values, generation = read_json(path), read_json_if_any(beside)
        outer = str(values.get("model_type"))
        if outer not in WRAPPERS:
            return cls(path, values, generation)
        config = cls(path, text_config(path, values), generation)
        config.wrapped_in = outer
        if config.get("tie_word_embeddings"):  # of either config, which transformers' versions keep in step or not
            config.family = replace(config.family, head_decides=True)
        return config

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; a missing or null one is `default`, ModelFormatError without that."""
        return int(self._number(key, default, int, 1))

    def number(self, key: str) -> float:
        """A number that is not negative; ModelFormatError for anything else."""
        return float(self._number(key, None, int | float, 0))

    def layers(self, stack: Stack) -> int:
        """How many layers a stack has; ModelFormatError when no key says it."""
        said = [key for key in stack.count if self.get(key) is not None]
        return self.size(said[0] if said else stack.count[0])

    def _number(self, key: str, default: int | None, kind: Any, low: int) -> Any:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value < 2**31:
            raise ModelFormatError(f"{self.path}: {self.family.spelling.get(key, key)} is {value!r}, not a size")
        return value

    def _owners(self) -> list[int] | None:
        if not self.family.sharing:
            return None
        try:
            return SHARING[self.family.sharing].owners(self.values)
        except ValueError as error:
            raise ModelFormatError(f"{self.path}: {error}") from None

    def _refuse(self) -> None:
        if self.get("is_causal") is False:
            raise UnsupportedError(
                f"{self.path}: is_causal = false: a model whose tokens see later ones is not supported"
            )
        method = self.get("quantization_config")
        runs_online = isinstance(method, dict) and method.get("quantization_mode") == "online"
        if method and not (self.family.ternary and runs_online):
            method = method.get("quant_method") if isinstance(method, dict) else method
        if not method and self.get("quantization"):
            method = "mlx"  # which has this key and names no method
        if method and not (self.family.ternary and runs_online) and method not in self.family.packed:
            raise UnsupportedError(f"{self.path}: weights quantised by {method!r}; convert the unquantised model")
        for key, allowed in self.family.only.items():
            if self.get(key) is not None and self.get(key) not in allowed:
                raise UnsupportedError(
                    f"{self.path}: {key} = {self.get(key)!r} is not supported for model type '{self.model_type}'; "
                    f"supported: {', '.join(map(str, allowed))}"
                )
        for one, other in self.family.equal:
            if None not in (self.get(one), self.get(other)) and self.get(one) != self.get(other):
                names = (self.family.spelling.get(key, key) for key in (one, other))
                raise UnsupportedError(
                    f"{self.path}: {' and '.join(names)} are {self.get(one)!r} and {self.get(other)!r}; only models "
                    "where they are equal are supported"
                )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, in elements; where layers differ, those of most.

    Attributes:
        differing: layers that do -> their n_kv_heads, head_dim and ff.
    """

    d: int
    ff: int
    v: int
    ctx: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    others: Mapping[str, int]
    differing: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

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
            others={symbol: config.size(key) for symbol, key in config.family.symbols.items()},
            differing=_differing(config, n_heads),
        )

    @property
    def rotating_dim(self) -> int:
        """Columns of a head of which RoPE turns all or a part: with a latent (symbol "rot") some at its end, else those
        of layers without a window, where theirs is another."""
        own = (one["head_dim"] for one in self.differing.values() if "head_dim" in one)
        return self.others.get("rot", next(own, self.head_dim))

    def in_layer(self, layer: int) -> Sizes:
        """The sizes in one layer."""
        own = self.differing.get(layer, {})
        return replace(
            self, n_kv_heads=own.get("n_kv_heads", self.n_kv_heads), head_dim=own.get("head_dim", self.head_dim),
            ff=own.get("ff", self.ff),
        )  # fmt: skip

    def shape(self, symbols: str) -> tuple[int, ...]:
        """The shape that a family's table writes in symbols."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        known = {"d": self.d, "q": q, "kv": kv, "qkv": q + 2 * kv, "ff": self.ff, "2ff": 2 * self.ff, "v": self.v}
        known |= {"ctx": self.ctx, "dk": self.head_dim, "2d": 2 * self.d, "heads": self.n_heads, **self.others}
        return tuple(int(symbol) if symbol.isdecimal() else known[symbol] for symbol in symbols.split())


def _differing(config: Config, n_heads: int) -> dict[int, dict[str, int]]:
    """Of per_layer_config: layer -> the sizes that it has instead."""
    ours, found = {"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim", "intermediate_size": "ff"}, {}
    with values_of(config.path):
        for layer, sizes in dict(config.get("per_layer_config") or {}).items():
            if unknown := sorted(sizes.keys() - ours.keys()):
                raise UnsupportedError(f"{config.path}: per_layer_config of {', '.join(unknown)} is not supported")
            if any(type(size) is not int or not 1 <= size < 2**31 for size in sizes.values()):
                raise ModelFormatError(f"{config.path}: per_layer_config of layer {layer} holds {sizes}, not sizes")
            if n_heads % (n_kv_heads := sizes.get("num_key_value_heads", 1)):
                raise ModelFormatError(
                    f"{config.path}: {n_heads} query heads do not share {n_kv_heads} key heads in layer {layer}"
                )
            found[int(layer)] = {ours[key]: size for key, size in sizes.items()}
    return found
