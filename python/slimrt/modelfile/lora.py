# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters (Hu et al. 2021), merged into a model that is converted: directories of PEFT, and GGUF files of
llama.cpp's convert_lora_to_gguf.py."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, quants

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData, Tensor, array, read_gguf
from slimrt.modelfile.hf.peft import CONFIG, Peft
from slimrt.tokenizer.tokenizer import Tokenizer

KEY = "slimrt.lora"  # metadata: the names of what was merged, and by what it was multiplied
Named: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
_SCALED = re.compile(r"(?P<path>.+):(?P<scale>[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|nan))", re.S | re.A | re.I)
_LARGEST = float(np.finfo(np.float32).max)
_F16 = GGMLQuantizationType.F16
_MERGED = (GGMLQuantizationType.F32, _F16, GGMLQuantizationType.BF16)  # weights of another type become f16


class GgufLora:
    """An adapter in a GGUF file: for some of a model's weights `NAME.lora_a` [r, in] and `NAME.lora_b` [out, r].

    Args:
        file: the file. scale: what its changes are multiplied with.

    Raises:
        ModelFormatError: a broken file, or one that is no adapter. UnsupportedError: one of another kind.
    """

    def __init__(self, file: Path, scale: float):
        self.file = self.path = file
        self.scale = scale
        model = read_gguf(file)
        if model.value("general.type", "") != "adapter":
            raise ModelFormatError(f"{file} is no adapter: general.type is not 'adapter'")
        kind = model.value("adapter.type", "")
        if kind != "lora" or "adapter.alora.invocation_tokens" in model.metadata:
            raise UnsupportedError(
                f"{file}: an adapter of type {kind!r}{' (aLoRA)' * (kind == 'lora')}; merged is LoRA"
            )
        self.arch, self._alpha = model.arch, model.value("adapter.lora.alpha", 0.0)
        if not isinstance(self._alpha, int | float) or not abs(self._alpha) <= _LARGEST:
            raise ModelFormatError(f"{file}: adapter.lora.alpha must be a finite number, got {self._alpha!r}")
        self._parts: dict[str, dict[str, Tensor]] = {}
        for tensor in model.tensors.values():
            name, _, part = tensor.name.rpartition(".")
            if part not in ("lora_a", "lora_b"):
                raise UnsupportedError(f"{file}: '{tensor.name}' is no part of a LoRA adapter that is known")
            self._parts.setdefault(name, {})[part] = tensor
        if not self._parts:
            raise ModelFormatError(f"{file} has no tensors: an adapter that changes nothing")
        if broken := next((name for name, parts in self._parts.items() if len(parts) < 2), None):
            raise ModelFormatError(f"{file}: '{broken}' has {next(iter(self._parts[broken]))} alone")

    @property
    def files(self) -> list[Path]:
        return [self.file]

    def merged(self, model: ModelData) -> tuple[ModelData, list[str]]:
        """The model with the changes merged in, computed when they are written, and warnings.

        Raises:
            ModelFormatError: the adapter is of another model.
            UnsupportedError: a weight changes that something else was computed from; an adapter of GPT-2.
        """
        if self.arch != model.arch:
            raise ModelFormatError(
                f"{self.file} is an adapter of a model of architecture '{self.arch}', not '{model.arch}'"
            )
        if self.arch == "gpt2":  # whose weights Hugging Face stores [in, out], and PEFT the products not
            raise UnsupportedError(
                f"{self.file} is of GPT-2, of which llama.cpp's converter writes products transposed: merge the "
                "adapter as PEFT saved it into a Hugging Face directory"
            )
        tensors, others = list[Tensor](), Counter[str]()
        for name, parts in self._parts.items():
            if name not in model.tensors:
                raise ModelFormatError(
                    f"{self.file} is an adapter of another model: it changes '{name}', which this one does not have"
                )
            tensor = model.tensors[name]
            if _of_embedding(tensor) and "output.weight" not in model.tensors:
                raise UnsupportedError(
                    f"{self.file} changes the token embedding alone, which is the output matrix of this model too"
                )
            if name.endswith(".attn_output.weight") and _moved_bias(model):
                raise UnsupportedError(
                    f"{self.file} changes '{name}', by which this file's V biases were multiplied when it was "
                    "converted for a cache: merge the adapter into the model as it was before"
                )
            self._check_shapes(tensor, **parts)
            kind = tensor.type if tensor.type in _MERGED else _F16
            others.update([tensor.type.name.lower()] * (kind != tensor.type))
            tensors.append(replace(tensor, type=kind, load=partial(self._load, tensor, kind)))
        warnings = [
            f"{n} weights in {kind} become f16, so that what {self.file.name} changes is not rounded away: --outtype "
            "makes them smaller"
            for kind, n in others.items()
        ]
        return model.with_tensors(*tensors), warnings

    def _check_shapes(self, tensor: Tensor, lora_a: Tensor, lora_b: Tensor) -> None:
        a, b = lora_a.shape, lora_b.shape
        if _of_embedding(tensor):
            a, b = b[::-1], a
        fits = len(a) == len(b) == len(tensor.shape) >= 2 and a[-2] == b[-1] and a[:-2] == b[:-2]
        if not fits or (*b[:-1], a[-1]) != tensor.shape:
            raise ModelFormatError(
                f"{self.file} is an adapter of another model: '{tensor.name}' is {list(tensor.shape)}, lora_a "
                f"{list(lora_a.shape)} and lora_b {list(lora_b.shape)}"
            )

    def _load(self, tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
        a, b = (self._parts[tensor.name][part].values() for part in ("lora_a", "lora_b"))
        scale = self.scale * (self._alpha / b.shape[-1] if self._alpha else 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = a @ b.T if _of_embedding(tensor) else b @ a
            found = quants.quantize(tensor.values() + np.float32(scale) * delta, kind)
        if not np.isfinite(quants.dequantize(found, kind)).all():
            raise ModelFormatError(f"'{tensor.name}' with the change of {self.file} is not finite in {kind.name}")
        return found.view(np.uint8)


def _moved_bias(model: ModelData) -> bool:
    """Whether slimrt moved V's bias into the output bias (`folding.weights.fold_value_bias`), which left zeros."""
    if "slimrt.format_version" not in model.metadata:
        return False
    for name, tensor in model.tensors.items():
        block, _, kind = name.rpartition(".attn_")
        if kind == "v.bias" and not tensor.values().any():
            return True
        if kind == "qkv.bias":
            kv = (tensor.shape[0] - model.tensor(f"{block}.attn_output.weight").shape[1]) // 2
            if not tensor.values()[-kv:].any():
                return True
    return False


def _of_embedding(tensor: Tensor) -> bool:
    """Whether lora_a is [vocab, r], since its rows are taken like the embedding's, and lora_b [width, r]."""
    return tensor.name == "token_embd.weight"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a conversion, in their order.

    Attributes:
        names: the last part of each path, and the scale. peft, gguf: those of each kind.
    """

    names: tuple[str, ...] = ()
    peft: tuple[Peft, ...] = ()
    gguf: tuple[GgufLora, ...] = ()

    @classmethod
    def of(cls, named: Named) -> Adapters:
        """Open adapters that are named by their paths, each with ":SCALE" behind it or without.

        Raises:
            FileNotFoundError: there is nothing at a path. Others as Peft and GgufLora.
        """
        names = [named] if isinstance(named, (str, os.PathLike)) else list(named)
        opened = [_opened(os.fspath(name)) for name in names]
        return cls(
            tuple(f"{one.path.name}:{one.scale:g}" for one in opened),
            tuple(one for one in opened if isinstance(one, Peft)),
            tuple(one for one in opened if isinstance(one, GgufLora)),
        )

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def files(self) -> list[Path]:
        """Every file that is read."""
        return [file for one in self._all for file in one.files]

    @property
    def scales(self) -> list[float]:
        return [one.scale for one in self._all]

    @property
    def _all(self) -> tuple[Peft | GgufLora, ...]:
        return self.peft + self.gguf

    def merged(self, model: ModelData, source: Path) -> tuple[ModelData, list[str]]:
        """A model that was read from `source` with the adapters of GGUF merged in, and warnings; those of PEFT are
        merged by `slimrt.modelfile.hf.directory.read_hf`.

        Raises:
            ModelFormatError: an adapter of another model. UnsupportedError: PEFT's for a model that is no directory.
        """
        if self.peft and not source.is_dir():
            raise UnsupportedError(
                f"{self.peft[0].directory} is an adapter of PEFT, whose names are those of a Hugging Face directory, "
                f"and {source.name} is none: convert that, or make a GGUF file of the adapter by llama.cpp's "
                "convert_lora_to_gguf.py"
            )
        warnings = list[str]()
        for one in self.gguf:
            model, more = one.merged(model)
            warnings += more
        for adapter in self.peft:
            warnings += _own_tokenizer(adapter.directory, source)
        if self:
            model = model.with_metadata({KEY: array([*model.value(KEY, []), *self.names], GGUFValueType.STRING)})
        return model, warnings


def _own_tokenizer(adapter: Path, base: Path) -> list[str]:
    """A warning on an adapter that was trained with other tokens or another chat template than the model's; else []."""
    if not all((directory / "tokenizer.json").is_file() for directory in (adapter, base)):
        return []
    bases = Tokenizer(base)
    try:
        own = Tokenizer(adapter)
    except (ModelFormatError, UnsupportedError) as error:
        return [f"{error}: whether the adapter was trained with the tokens of {base} is not known"]
    texts = {
        "tokens": own.vocabulary.tokens != bases.vocabulary.tokens,
        "end of text": own.eos_id not in (None, bases.eos_id),
        "chat template": own.chat_template not in (None, bases.chat_template),
    }
    others = ", ".join(what for what, differs in texts.items() if differs)
    return [f"{adapter} has its own {others}: not used, the result has what {base} has"] if others else []


def _opened(name: str) -> Peft | GgufLora:
    path, scale = Path(name), 1.0
    if not path.exists() and (scaled := _SCALED.fullmatch(name)):
        path, scale = Path(scaled["path"]), float(scaled["scale"])
        if not abs(scale) <= _LARGEST:
            raise ValueError(f"{name}: the scale of an adapter must be a finite number, of float32")
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ModelFormatError(f"{path} is no adapter: it has no {CONFIG}")
        return Peft(path, scale)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such adapter: a directory of PEFT or a GGUF file, with :SCALE or without")
    return GgufLora(path, scale)
