# SPDX-License-Identifier: Apache-2.0
"""The text part of models that also read images or sound: their text_config, and those of their tensors.

A wrapper lists what it leaves out; a tensor that is neither listed nor the text model's is refused as anywhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimrt.errors import ModelFormatError
from slimrt.modelfile.hf.family import Source
from slimrt.modelfile.hf.safetensors_files import Entry


@dataclass(frozen=True)
class Wrapper:
    """A Hugging Face model type around a text model.

    Attributes:
        unread: what slimrt does not do that it does, as a sentence.
        left_out: the modules that do it, with or without "model." before.
    """

    unread: str
    left_out: tuple[str, ...]


_MOVING = "images and video are not read"
_LLAVA = Wrapper("images are not read", ("vision_tower", "multi_modal_projector"))
_IDEFICS3 = Wrapper("images are not read", ("vision_model", "connector"))
_SOUND = Wrapper("sound is not read", ("audio_tower", "multi_modal_projector"))
_SENSES = "images, video and sound are not read"
_WITH_NEWLINE = Wrapper("images are not read", (*_LLAVA.left_out, "image_newline"))
WRAPPERS: dict[str, Wrapper] = {
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "llava": _LLAVA,
    "vipllava": _LLAVA,
    "mistral3": _LLAVA,
    "gemma3": _LLAVA,
    "gemma4": Wrapper(_SENSES, ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
    "gemma4_unified": Wrapper(_SENSES, ("vision_embedder", "embed_vision", "embed_audio")),
    "internvl": _LLAVA,
    "got_ocr2": _LLAVA,
    "llava_next": _WITH_NEWLINE,
    "llava_next_video": Wrapper(_MOVING, _WITH_NEWLINE.left_out),
    "llava_onevision": Wrapper(_MOVING, _WITH_NEWLINE.left_out),
    "video_llava": Wrapper(_MOVING, ("image_tower", "video_tower", "multi_modal_projector")),
    "qwen2_vl": Wrapper(_MOVING, ("visual",)),
    "qwen2_5_vl": Wrapper(_MOVING, ("visual",)),
    "qwen2_audio": _SOUND,
    "voxtral": _SOUND,
}

# Text model types that have no class of their own here.
_TEXT_TYPES = dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2")

# Where wrappers keep the text model -> what it is called when it is alone.
_PLACES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}

# What a text_config leaves out when it is as its model type has it: transformers' own defaults.
_USUAL: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {"vocab_size": 32000, "intermediate_size": 14336},
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016},
}
_USUAL = {
    kind: {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, **sizes}
    for kind, sizes in _USUAL.items()
}
_USUAL["gemma3_text"] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_USUAL |= dict.fromkeys(
    _TEXT_TYPES,
    {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
_USUAL["ministral3"] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
}
_USUAL["gemma4_text"] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_USUAL["gemma4_unified_text"] = _USUAL["gemma4_text"]


def text_config(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the text model in those of a wrapper's config.json.

    Raises:
        ModelFormatError: there are none.
    """
    outer = str(values.get("model_type"))
    of_flat = f"{outer}_text"  # early configs without a text_config
    flat = of_flat in _TEXT_TYPES and "text_config" not in values
    text = {**values, "model_type": of_flat} if flat else values.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelFormatError(f"{path}: no text_config, which a model of type {outer!r} has")
    kind = str(text.get("model_type", "llama"))
    found = {**_USUAL.get(kind, {}), **text, "model_type": _TEXT_TYPES.get(kind, kind)}
    found.pop("tie_word_embeddings", None)  # neither says it: as the text model's type has it
    if ties := [one["tie_word_embeddings"] for one in (values, text) if one.get("tie_word_embeddings") is not None]:
        found["tie_word_embeddings"] = any(ties)
    found |= {key: values[key] for key in ("quantization_config", "quantization") if key in values}
    rope = found.get("rope_scaling")
    if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
        found["rope_scaling"] = None  # of a text all three of its positions are the same
    return found


class TextPart:
    """The tensors of a text model, by the names that it has alone, and those that have no place.

    Args:
        wrapped_in: the model type around it; "": it is alone.

    Attributes:
        note: what is left out, and what follows; "": nothing.
    """

    def __init__(self, checkpoint: Source, wrapped_in: str):
        self._checkpoint, self.note = checkpoint, ""
        self._names = {name: name for name in checkpoint.entries}  # alone -> in the files
        if wrapped_in:
            wrapper = WRAPPERS[wrapped_in]
            modules = {name: _left_out(name, wrapper) for name in checkpoint.entries}
            self._names = {_alone(name): name for name, module in modules.items() if not module}
            counts = Counter(module for module in modules.values() if module)
            listed = ", ".join(f"{module} ({count})" for module, count in sorted(counts.items()))
            self.note = f"the text part of a '{wrapped_in}' model: {wrapper.unread}; "
            self.note += f"tensors left out: {listed or 'none'}"

    @property
    def names(self) -> frozenset[str]:
        """The names of its tensors in the files."""
        return frozenset(self._names.values())

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {alone: self._checkpoint.entries[name] for alone, name in self._names.items()}

    def elements(self, name: str) -> np.ndarray:
        """As `Source.elements`."""
        return self._checkpoint.elements(self._names[name])


def _left_out(name: str, wrapper: Wrapper) -> str:
    """The module of the wrapper that a tensor belongs to; "": none that it leaves out."""
    found = (module for module in wrapper.left_out if f"{name.removeprefix('model.')}.".startswith(f"{module}."))
    return next(found, "")


def _alone(name: str) -> str:
    place = next((place for place in _PLACES if name.startswith(place)), "")
    return _PLACES[place] + name.removeprefix(place) if place else name
