# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: from a Hugging Face config's spelling to GGUF's keys."""

from __future__ import annotations

from gguf.constants import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import array, uint32
from slimrt.modelfile.hf.config import Config, Sizes
from slimrt.modelfile.positions import by_period


def window_fields(config: Config, sizes: Sizes) -> dict[str, GGUFValue]:
    """Return the GGUF fields (without the architecture's prefix) that say which layers see a window; none of a model
    without windows.

    Raises:
        UnsupportedError: only some layers have it, or the runtime cannot honour it in this family.
        ModelFormatError: kinds of more or fewer layers than there are.
    """
    if config.family.window is None or not config.get("sliding_window"):
        return {}
    if (
        config.get("use_sliding_window") is False and "use_sliding_window" in config.family.defaults
    ):  # others have no such key
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise UnsupportedError(f"{config.path}: layer_types has windows, and use_sliding_window is false")
        return {}
    window, usual = config.size("sliding_window"), _usual_period(config)
    sliding = _sliding(config, sizes.n_layers, usual)
    if not any(sliding) and _rotates_in_windows_alone(config):
        raise UnsupportedError(
            f"{config.path}: no layer has the window beside which positions are known; none would turn"
        )
    if not any(sliding) or (window >= sizes.ctx and not usual and not config.family.window):
        return {}
    if not all(sliding) and not usual:
        raise UnsupportedError(
            f"{config.path}: a sliding window in {sum(sliding)} of {sizes.n_layers} layers is not supported"
        )
    if not config.family.window:
        raise UnsupportedError(
            f"{config.path}: use_sliding_window is not supported for model type '{config.model_type}'"
        )
    fields = {"attention.sliding_window": uint32(window)}
    if usual and (config.family.window_pattern or sliding != by_period(usual, sizes.n_layers)):
        fields["attention.sliding_window_pattern"] = array(sliding, GGUFValueType.BOOL)
    return fields


def _usual_period(config: Config) -> int:
    """Every so many-th layer sees all where nothing else is said; 0: none does."""
    return next(a.full_period for a in core.architectures() if a.name == config.family.arch)


def _rotates_in_windows_alone(config: Config) -> bool:
    return next(a.window_rope for a in core.architectures() if a.name == config.family.arch) == "only"


def _sliding(config: Config, n_layers: int, usual: int) -> list[bool]:
    """Which layers see a window. The list counts more than the number that it was once made of."""
    if isinstance(kinds := config.get("layer_types"), list):
        if len(kinds) != n_layers:
            raise ModelFormatError(f"{config.path}: layer_types names {len(kinds)} layers, not {n_layers}")
        return [kind == "sliding_attention" for kind in kinds]
    if usual:
        return by_period(config.size("sliding_window_pattern", usual), n_layers)
    first = config.number("max_window_layers") if config.get("max_window_layers") else 0
    return [i >= first for i in range(n_layers)]
