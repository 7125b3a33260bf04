# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of Hugging Face's PEFT, merged into a directory's weights: W + s B A (Hu et al. 2021, section 4.1).

What an adapter does beyond that is merged as PEFT does it: ranks and scales by module, s = alpha / sqrt(r) (rsLoRA),
magnitudes (DoRA, Liu et al. 2024, equation 5), modules that were trained whole. What is not known is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.families import Source
from slimrt.modelfile.hf.layout import as_float32, as_stored
from slimrt.modelfile.hf.safetensors_files import DTYPES, read_entries, read_json, stored_elements

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
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
        for own, change in self._changes.items():
            self._check_parts(own, change)

    @property
    def files(self) -> list[Path]:
        return [self.directory / CONFIG, self.file]

    @property
    def changes_embedding(self) -> bool:
        """Whether a product is added to a token embedding."""
        return any("lora_embedding_A" in change.parts for change in self._changes.values())

    def places(self, names: Iterable[str]) -> dict[str, str]:
        """Of the weights `names` of a model those that change, each with the adapter's name for it. Modules around a
        text model may be missing in either: the longest end of a name that they have in common counts.

        Raises:
            ModelFormatError: the adapter is of another model: it changes a weight that is not among them.
        """
        by_end: dict[str, list[str]] = {}
        for name in names:
            for end in _ends(name):
                by_end.setdefault(end, []).append(name)
        found = dict[str, str]()
        for own in self._changes:
            candidates = next((by_end[end] for end in _ends(own) if end in by_end), [])
            if own in candidates:
                candidates = [own]
            if len(candidates) != 1 or candidates[0] in found:
                why = "may be several of this one" if candidates else "this one does not have"
                raise ModelFormatError(
                    f"{self.directory} is an adapter of another model: it changes '{own}', which {why}"
                )
            found[candidates[0]] = own
        return found

    def merged(self, own: str, weight: np.ndarray) -> np.ndarray:
        """The weight with the adapter's change, float32 as it is; `own` is the adapter's name for it, as in places().

        Raises:
            ModelFormatError: the change has another shape.
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
        delta, turned = b @ a, bool(self.config.get("fan_in_fan_out"))  # turned: stored as [in, out], as in GPT-2
        if delta.shape[0] != delta.shape[1]:  # then the shape says it, which some configs have wrong
            turned = delta.shape != weight.shape
        delta = delta.T if turned or "lora_embedding_A" in change.parts else delta
        self._check_shape(own, delta, weight)
        magnitude = change.parts.get("lora_magnitude_vector")
        scale = self._alpha(own.removesuffix(".weight")) / self._divisor(len(a)) * (1.0 if magnitude else self.scale)
        result = weight + np.float32(scale) * delta
        if magnitude:
            norm = np.linalg.norm(result, axis=0 if turned else 1, keepdims=True)
            whole = result * (self._values(magnitude).reshape(norm.shape) / norm)
            result = weight + np.float32(self.scale) * (whole - weight)
        return np.asarray(result, np.float32)

    def _add(self, name: str) -> None:
        plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if match := _PART.fullmatch(plain):
            self._changes.setdefault(f"{match['module']}.weight", _Change()).parts[match["part"]] = name
        elif "lora_" in plain or not name.startswith(_PREFIX) or not plain.endswith((".weight", ".bias")):
            raise UnsupportedError(f"{self.file}: '{name}' is no part of a LoRA adapter that is known")
        else:
            self._changes.setdefault(plain, _Change()).whole = name

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

    def _alpha(self, module: str) -> float:
        pattern: Mapping[str, Any] = self.config.get("alpha_pattern") or {}
        key = next((key for key in pattern if re.fullmatch(rf"(.*\.)?({key})", module)), None)
        return float(self.config["lora_alpha"] if key is None else pattern[key])

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
    """A name, and without its first words, longest first, down to a layer's number or to a module and its weight."""
    words = name.split(".")
    number = next((i for i, word in enumerate(words) if word.isdecimal()), len(words))
    return [".".join(words[i:]) for i in range(min(number, len(words) - 2) + 1)]


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
    numbers = [config.get("lora_alpha"), *dict(config.get("alpha_pattern") or {}).values()]
    if not all(isinstance(one, (int, float)) for one in numbers):
        raise ModelFormatError(f"{path}: lora_alpha and alpha_pattern must be numbers, got {numbers!r}")


class Adapted:
    """The weights of a model with adapters merged into them, in the types that they have, one after the other.

    Raises:
        ModelFormatError: an adapter of another model.
        UnsupportedError: a weight that changes is quantised.
    """

    def __init__(self, source: Source, adapters: Sequence[Peft]):
        self._source, self.entries = source, source.entries
        self._changes = [(adapter, adapter.places(source.entries)) for adapter in adapters]
        for adapter, places in self._changes:
            for place in places:
                if (dtype := self.entries[place].dtype) not in _MERGED:
                    raise UnsupportedError(
                        f"{adapter.directory} changes '{place}', which is {dtype}: adapters are merged into weights in "
                        f"{', '.join(_MERGED)}; take the model in one of these"
                    )

    def elements(self, name: str) -> np.ndarray:
        """As `Source.elements`."""
        stored, dtype = self._source.elements(name), self.entries[name].dtype
        changes = [(adapter, places[name]) for adapter, places in self._changes if name in places]
        if not changes:
            return stored
        weight = as_float32(stored, dtype)
        for adapter, own in changes:
            weight = adapter.merged(own, weight)
        found = as_stored(weight, dtype)
        if not np.isfinite(as_float32(found, dtype)).all():
            raise ModelFormatError(f"'{name}' with the change of an adapter is not finite in {dtype}")
        return found
