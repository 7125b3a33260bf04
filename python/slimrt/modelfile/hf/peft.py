# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of Hugging Face's PEFT, merged into a directory's weights: W + s B A (Hu et al. 2021, section 4.1).

What an adapter does beyond that is merged as PEFT does it: ranks and scales by module, s = alpha / sqrt(r) (rsLoRA),
magnitudes (DoRA, Liu et al. 2024, equation 5), modules that were trained whole. What is not known is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.family import Source
from slimrt.modelfile.hf.safetensors_files import DTYPES, as_float32, as_stored, read_entries, stored_elements
from slimrt.tokenizer.hf import read_json

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HEAD = "lm_head.weight"
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_PRODUCTS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
# Options that say nothing of the result, or are read here; another one that is set is refused.
_READ = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config "
    "exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config "
    "lora_alpha lora_dropout lora_ga_config megatron_core modules_to_save peft_type peft_version qalora_group_size r "
    "rank_pattern revision runtime_config target_modules task_type use_dora use_rslora velora_config".split()
)
_MERGED = ("F32", "F16", "BF16")
_LARGEST = float(np.finfo(np.float32).max)
# Names of modules around a text model, which an adapter may have and the model's files not, and the other way round.
_AROUND = frozenset("model language_model text_model transformer gpt_neox".split())
# Ways to begin that change the base model too, so that the adapter is one of that.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass
class _Change:
    """What an adapter does to one weight: a weight in its place, and the parts of a product, by PEFT's names."""

    parts: dict[str, str] = field(default_factory=dict)
    whole: str = ""

    def product(self) -> tuple[str, str]:
        """The adapter's names of A and B."""
        a, b = next(pair for pair in _PRODUCTS if pair[0] in self.parts)
        return self.parts[a], self.parts[b]


class Peft:
    """An adapter in a directory: adapter_config.json and adapter_model.safetensors.

    Args:
        directory: where it is.
        scale: what its changes are multiplied with; where a weight was trained whole, 1 alone is possible.

    Raises:
        ModelFormatError: a file is missing, broken, or contradicts the other.
        UnsupportedError: a method other than LoRA, an option that is not known, weights in another format.
    """

    def __init__(self, directory: Path, scale: float):
        self.directory, self.scale = directory, scale
        self.path = directory.absolute()
        self.config = read_json(directory / CONFIG)
        _check_config(self.config, directory / CONFIG)
        self.file = directory / _WEIGHTS
        if not self.file.is_file():
            others = ", ".join(sorted(path.name for path in directory.glob("adapter_model.*")))
            raise UnsupportedError(
                f"{directory} has no {_WEIGHTS}{', but ' + others if others else ''}: save it as safetensors: "
                "model.save_pretrained(DIR) in peft"
            )
        self._entries = read_entries(self.file)
        self._changes: dict[str, _Change] = {}
        for name, entry in self._entries.items():
            if entry.dtype not in DTYPES:
                raise UnsupportedError(
                    f"{self.file}: '{name}' is {entry.dtype}; adapters are read in {', '.join(DTYPES)}"
                )
            self._add(name)
        if not self._changes:
            raise ModelFormatError(f"{self.file} is empty: an adapter that changes nothing")
        for own, change in self._changes.items():
            self._check_parts(own, change)

    @property
    def files(self) -> list[Path]:
        return [self.directory / CONFIG, self.file]

    def places(self, names: Iterable[str], head: str) -> dict[str, str]:
        """Of the weights `names` of a model those that change, each with the adapter's name for it. Modules around a
        text model may be missing in either: the longest end of a name that they have in common counts.

        Args:
            head: the module of the output matrix, which transformers calls lm_head even where files do not (GPT-NeoX).

        Raises:
            ModelFormatError: the adapter is of another model: it changes a weight that is not among them.
            UnsupportedError: it changes the output matrix, and the model has none of its own.
        """
        by_end: dict[str, list[str]] = {}
        for name in names:
            for end in _ends(name):
                by_end.setdefault(end, []).append(name)
        found = dict[str, str]()
        for own in self._changes:
            candidates = next((by_end[end] for end in _ends(own) if end in by_end), [])
            if not candidates and head and _ends(own)[-1] in (_HEAD, f"{head}.weight"):
                candidates = by_end.get(f"{head}.weight", [])
                if not candidates:
                    raise UnsupportedError(
                        f"{self.directory} changes '{own}', and the output matrix of this model is its token embedding"
                    )
            if own in candidates:
                candidates = [own]
            other = found.get(candidates[0]) if candidates else None
            if len(candidates) != 1 or other:
                why = "may be several of this one" if candidates else "this one does not have"
                why = f"is '{other}' again in this one" if other else why
                raise ModelFormatError(
                    f"{self.directory} is an adapter of another model: it changes '{own}', which {why}"
                )
            found[candidates[0]] = own
        return found

    def adds_to(self, own: str) -> bool:
        """Whether a product is added to a weight; else it was trained whole. `own` as in merged()."""
        return bool(self._changes[own].parts)

    def merged(self, own: str, weight: np.ndarray, conv1d: bool) -> np.ndarray:
        """The weight with the adapter's change, float32 as it is.

        Args:
            own: the adapter's name for it, as in places().
            conv1d: matrices of layers are stored [in, out]. (fan_in_fan_out says what the last module was that PEFT
                wrapped, which may be a head beside them.)

        Raises:
            ModelFormatError: the change has another shape.
            UnsupportedError: the weight was trained whole, and the scale is not 1.
        """
        change = self._changes[own]
        if change.whole:
            value = self._values(change.whole)
            self._check_shape(own, value, weight)
            if self.scale != 1 and not np.array_equal(value, weight):
                raise UnsupportedError(
                    f"{self.file}: '{own}' was trained whole, which no scale applies to: leave out {self.scale:g}"
                )
            weight = value
        if not change.parts:
            return weight
        a, b = (self._values(name) for name in change.product())
        delta = b @ a
        turned = conv1d and delta.shape[::-1] == weight.shape
        delta = delta.T if turned or "lora_embedding_A" in change.parts else delta
        self._check_shape(own, delta, weight)
        magnitude = change.parts.get("lora_magnitude_vector")
        scale = self._said("lora_alpha", "alpha_pattern", own) / self._divisor(len(a))
        scale *= 1.0 if magnitude else self.scale
        result = weight + np.float32(scale) * delta
        if magnitude:
            norm = np.linalg.norm(result, axis=0 if turned else 1, keepdims=True)
            whole = result * (self._values(magnitude).reshape(norm.shape) / norm)
            result = weight + np.float32(self.scale) * (whole - weight)
        return np.asarray(result, np.float32)

    def _add(self, name: str) -> None:
        # bias="all" has the biases of modules_to_save twice more: under this name, and as the model's own were.
        same = name.replace(".modules_to_save.", ".")
        if ".original_module." in name or (same != name and same in self._entries):
            return
        plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if match := _PART.fullmatch(plain):
            parts = self._changes.setdefault(f"{match['module']}.weight", _Change()).parts
            if other := parts.get(match["part"]):
                raise ModelFormatError(f"{self.file}: '{other}' and '{name}' are the same part of an adapter")
            parts[match["part"]] = name
        elif "lora_" in plain or not name.startswith(_PREFIX) or not plain.endswith((".weight", ".bias")):
            raise UnsupportedError(f"{self.file}: '{name}' is no part of a LoRA adapter that is known")
        else:
            change = self._changes.setdefault(plain, _Change())
            if change.whole:
                raise ModelFormatError(f"{self.file}: '{change.whole}' and '{name}' are the same weight")
            change.whole = name

    def _check_parts(self, own: str, change: _Change) -> None:
        where = f"{self.file}: '{own}'"
        if not change.parts:
            return
        pair = _PRODUCTS["lora_embedding_A" in change.parts or "lora_embedding_B" in change.parts]
        if missing := [part for part in pair if part not in change.parts]:
            raise ModelFormatError(f"{where} has {', '.join(sorted(change.parts))} without {missing[0]}")
        if others := sorted(change.parts.keys() - {*pair, "lora_magnitude_vector"}):
            raise ModelFormatError(f"{where} has {pair[0]} and {others[0]}")
        if "lora_magnitude_vector" in change.parts and pair[0] != "lora_A":
            raise UnsupportedError(f"{where}: DoRA of an embedding is not supported")
        a, b = (self._entries[change.parts[part]].shape for part in pair)
        if max(len(a), len(b)) > 2:
            raise UnsupportedError(f"{where}: LoRA of a convolution is not supported")
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise ModelFormatError(f"{where}: {pair[0]} is {list(a)} and {pair[1]} {list(b)}, which have no product")
        if a[0] != (rank := self._said("r", "rank_pattern", own)):
            raise ModelFormatError(f"{where} is of rank {a[0]}, and {CONFIG} says {rank:g}")
        magnitude, dora = change.parts.get("lora_magnitude_vector"), self.config.get("use_dora")
        if bool(magnitude) != bool(dora):
            raise ModelFormatError(f"{where} has {'a' if magnitude else 'no'} magnitude, and use_dora is {dora}")
        if magnitude and (n := math.prod(self._entries[magnitude].shape)) != b[0]:
            raise ModelFormatError(f"{where} has {n} magnitudes for {b[0]} rows")

    def _said(self, key: str, pattern_key: str, own: str) -> float:
        """What the config says of a weight: of the first pattern that its module's name ends with, or of all."""
        pattern: Mapping[str, Any] = self.config.get(pattern_key) or {}
        module = own.removesuffix(".weight")
        found = next((one for one in pattern if re.fullmatch(rf"(.*\.)?({one})", module)), None)
        return float(self.config[key] if found is None else pattern[found])

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.config.get("use_rslora") else rank

    def _values(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        return as_float32(stored_elements(entry), entry.dtype)

    def _check_shape(self, own: str, value: np.ndarray, weight: np.ndarray) -> None:
        if value.shape != weight.shape:
            raise ModelFormatError(
                f"{self.directory} is an adapter of another model: '{own}' is {list(weight.shape)}, and its change "
                f"{list(value.shape)}"
            )


def _ends(name: str) -> list[str]:
    """A name, and without the modules around a text model, one after the other."""
    words = name.split(".")
    around = next(i for i, word in enumerate(words) if word not in _AROUND or i == len(words) - 1)
    return [".".join(words[i:]) for i in range(around + 1)]


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{path}: an adapter of type {config.get('peft_type')!r}; those that are merged are 'LORA'"
        )
    if unknown := next((key for key, value in config.items() if value and key not in _READ), None):
        raise UnsupportedError(f"{path}: {unknown} is {config[unknown]!r}, which merging does not do")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{path}: init_lora_weights is {start!r}, which changed the base model too: in peft, save_pretrained() "
            "with path_initial_model_for_weight_conversion makes an adapter of the model as it was"
        )
    for key in ("use_dora", "use_rslora"):
        if not isinstance(config.get(key), bool | None):
            raise ModelFormatError(f"{path}: {key} must be true or false, got {config[key]!r}")
    _check_numbers(config, path, "lora_alpha", "alpha_pattern", lambda one: isinstance(one, int | float), "numbers")
    _check_numbers(
        config, path, "r", "rank_pattern", lambda one: isinstance(one, int) and one > 0, "positive whole numbers"
    )


def _check_numbers(
    config: Mapping[str, Any], path: Path, key: str, pattern_key: str, fits: Callable[[Any], bool], what: str
) -> None:
    """ModelFormatError: a number, or those by regular expressions of modules, are not what they must be."""
    pattern = config.get(pattern_key) or {}
    if not isinstance(pattern, dict):
        raise ModelFormatError(f"{path}: {pattern_key} must be an object, got {pattern!r}")
    numbers = [config.get(key), *pattern.values()]
    if not all(fits(one) and not isinstance(one, bool) and abs(one) < _LARGEST for one in numbers):
        raise ModelFormatError(f"{path}: {key} and {pattern_key} must be {what}, got {numbers!r}")
    for one in pattern:
        try:
            re.compile(one)
        except re.error as error:
            raise ModelFormatError(f"{path}: {pattern_key}: {one!r} is no regular expression: {error}") from error


class Adapted:
    """The weights of a model with adapters merged into them, in the types that they have, one after the other.

    Args:
        head: as of `Peft.places`.
        conv1d: matrices of layers are stored [in, out], as in GPT-2.

    Attributes:
        changes: the adapters, each with its places in the model.

    Raises:
        ModelFormatError: an adapter of another model.
        UnsupportedError: a weight that changes is quantised.
    """

    def __init__(self, source: Source, adapters: Sequence[Peft], head: str, conv1d: bool):
        self._source, self.entries, self._conv1d = source, source.entries, conv1d
        self.changes = [(adapter, adapter.places(source.entries, head)) for adapter in adapters]
        for adapter, places in self.changes:
            for place in places:
                if (dtype := self.entries[place].dtype) not in _MERGED:
                    raise UnsupportedError(
                        f"{adapter.directory} changes '{place}', which is {dtype}: adapters are merged into weights in "
                        f"{', '.join(_MERGED)}; take the model in one of these"
                    )

    def elements(self, name: str) -> np.ndarray:
        """As `Source.elements`."""
        stored, dtype = self._source.elements(name), self.entries[name].dtype
        changes = [(adapter, places[name]) for adapter, places in self.changes if name in places]
        if not changes:
            return stored
        with np.errstate(all="ignore"):  # what is not finite is refused
            weight = as_float32(stored, dtype)
            for adapter, own in changes:
                weight = adapter.merged(own, weight, self._conv1d)
            found = as_stored(weight, dtype)
        if not np.isfinite(as_float32(found, dtype)).all():
            raise ModelFormatError(f"'{name}' with the change of an adapter is not finite in {dtype}")
        return found
