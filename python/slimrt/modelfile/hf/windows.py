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
        UnsupportedError: only some layers have it, or the runtime cannot honour it in this family; or keys contradict
            each other.
        ModelFormatError: kinds of more or fewer layers than there are, or a window of no tokens.
    """
    if config.family.window is None:
        _refuse_stray(config, sizes)
        return {}
    traits = core.architectures()[config.family.arch]
    usual, kinds = traits.full_period, _kinds_of_layers(config, sizes.n_layers)
    # other families than those of the key ignore it
    if config.get("use_sliding_window") is False and "use_sliding_window" in config.family.defaults:
        if "sliding_attention" in kinds:
            raise UnsupportedError(f"{config.path}: layer_types has windows, and use_sliding_window is false")
        return {}
    if config.get("sliding_window") is None:
        if "sliding_attention" in kinds or (usual and not kinds):
            raise UnsupportedError(f"{config.path}: layers have windows, and sliding_window says no size of them")
        return {}
    window = config.size("sliding_window")
    sliding = [kind == "sliding_attention" for kind in kinds] or _sliding(config, sizes.n_layers, usual)
    if not any(sliding) and traits.window_rope == "only":
        raise UnsupportedError(
            f"{config.path}: no layer has the window beside which positions are known; none would turn"
        )
    everywhere = config.family.window and not usual  # whatever the config says of single layers
    if not (any(sliding) or everywhere) or (window >= sizes.ctx and not config.family.window):
        return {}
    if not all(sliding) and not usual:
        raise UnsupportedError(
            f"{config.path}: a sliding window in {sum(sliding)} of {sizes.n_layers} layers is not supported"
            + (f": all layers of model type '{config.model_type}' have it" if everywhere else "")
        )
    if not config.family.window:
        raise UnsupportedError(
            f"{config.path}: use_sliding_window is not supported for model type '{config.model_type}'"
        )
    fields = {"attention.sliding_window": uint32(window)}
    if usual and (config.family.window_pattern or sliding != by_period(usual, sizes.n_layers)):
        fields["attention.sliding_window_pattern"] = array(sliding, GGUFValueType.BOOL)
    return fields


def _refuse_stray(config: Config, sizes: Sizes) -> None:
    """UnsupportedError: a window in a family without. Its layers in transformers attend to all rows, but while it
    generates its cache drops those before the window: nobody knows how the model was trained."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return
    if (window := config.size("sliding_window")) < sizes.ctx:
        raise UnsupportedError(
            f"{config.path}: sliding_window = {window} is not supported for model type '{config.model_type}', whose "
            "layers have no window: remove the key if the model was trained without one"
        )


def _kinds_of_layers(config: Config, n_layers: int) -> list[str]:
    """layer_types, which counts more than the number that it was once made of; []: it is left out."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return []
    if len(kinds) != n_layers:
        raise ModelFormatError(f"{config.path}: layer_types names {len(kinds)} layers, not {n_layers}")
    if unknown := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise UnsupportedError(f"{config.path}: layer_types of {', '.join(unknown)} are not supported")
    return kinds


def _sliding(config: Config, n_layers: int, usual: int) -> list[bool]:
    """Which layers see a window, where layer_types does not say it."""
    if usual:
        return by_period(config.size("sliding_window_pattern", usual), n_layers)
    first = config.number("max_window_layers") if config.get("max_window_layers") else 0
    return [i >= first for i in range(n_layers)]
