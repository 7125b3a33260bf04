# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: from a Hugging Face config's spelling to GGUF's keys and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import Tensor, float32, string, uint32

_LARGEST = float(np.finfo(np.float32).max)  # GGUF holds these numbers in 32 bits
_ALIASES = {"su": "longrope", "none": "default"}
_KINDS = {"full_attention", "sliding_attention"}
_OF_MODELS = {"rope_theta", "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings",
              "yarn_log_multiplier"}  # that may stand beside the parameters  # fmt: skip


class _Parameters:
    """The RoPE parameters of a config, in either spelling: transformers 4's rope_scaling or 5's rope_parameters."""

    def __init__(self, config: Mapping[str, Any], found: Mapping[str, Any], aliases: Mapping[str, str]):
        self._config, self._found = config, found
        kind = str(self.get("rope_type") or self.get("type") or "default")
        kind = _ALIASES.get(kind, kind)
        self.kind = aliases.get(kind, kind)

    def get(self, key: str, default: Any = None) -> Any:
        return self._found.get(key, self._config.get(key) if key in _OF_MODELS else default)

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise ModelFormatError(f"config.json: RoPE's {key} is {value!r}, not a positive number (of 32 bits)")
        return float(value)

    def factors(self, key: str, count: int) -> np.ndarray:
        values = self.get(key)
        numbers = isinstance(values, list) and all(isinstance(v, int | float) and 0 < v <= _LARGEST for v in values)
        if not numbers or len(values) != count:
            raise ModelFormatError(f"config.json: RoPE's {key} is not a list of {count} positive numbers")
        return np.array(values, np.float64)

    def original_context(self) -> float:
        """The context before scaling; at the top of the config (Phi-3) it counts more than inside."""
        top = self._config.get("original_max_position_embeddings")
        context = top or self.get("original_max_position_embeddings") or self._context()
        if isinstance(context, bool) or not isinstance(context, int | float) or not 2 <= context < 2**31:
            raise ModelFormatError(f"config.json: original_max_position_embeddings is {context!r}, not a context")
        return float(context)

    def _context(self) -> float:
        return float(self._config["max_position_embeddings"])

    def stretch(self) -> float:
        return self._context() / self.original_context()


def said_of_rope(config: Mapping[str, Any]) -> Any:
    """The RoPE parameters as transformers 4 spells them, or as 5 does; nothing of them: {}."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def require_kinds_of_layers(rope: Mapping[str, Any]) -> None:
    """UnsupportedError where rope_parameters do not say which layers have them: transformers ignores them then."""
    if loose := sorted(key for key, value in rope.items() if key not in _KINDS and not isinstance(value, dict)):
        raise UnsupportedError(f"config.json: rope_parameters do not say which layers have this {loose[0]}")


def by_kinds_of_layers(config: Mapping[str, Any], bases: Mapping[str, float]) -> dict[str, Any]:
    """The keys rope_parameters and rope_scaling of a family whose layers with a window have parameters of their own, in
    transformers 5's spelling: rope_scaling is that of the layers without one, over what rope_parameters say of them.

    Args:
        bases: kind of layers -> its base, where its parameters do not say one.

    Raises:
        UnsupportedError: parameters that transformers ignores here.
    """
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    require_kinds_of_layers(rope)
    if nested := sorted(key for key, value in scaling.items() if isinstance(value, dict)):
        raise UnsupportedError(f"config.json: rope_scaling of {', '.join(nested)} is not supported")
    if "type" in scaling and "rope_type" not in scaling:
        raise UnsupportedError("config.json: rope_scaling says its type and no rope_type, which alone is read here")
    found = {kind: {"rope_theta": base} | (rope.get(kind) or {}) for kind, base in bases.items()}
    found["full_attention"] |= scaling
    return {"rope_parameters": {**rope, **found}, "rope_scaling": None}


def _of_layers(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The parameters of layers without a window, or of all; and of those with one, where they have their own."""
    found = said_of_rope(config)
    if not isinstance(found, dict):
        raise ModelFormatError(f"config.json: rope_parameters is {found!r}, not an object")
    if not any(isinstance(value, dict) for value in found.values()):
        return found, None
    if unknown := sorted(found.keys() - _KINDS):
        raise UnsupportedError(f"config.json: rope_parameters of {', '.join(unknown)} are not supported")
    return found.get("full_attention") or {}, found.get("sliding_attention") or {}


def rope_fields(
    config: Mapping[str, Any], head_dim: int, aliases: Mapping[str, str], *, windows: int = 0
) -> tuple[dict[str, GGUFValue], list[Tensor]]:
    """Return the GGUF fields (without the architecture's prefix) and tensors that say how positions are rotated.

    Args:
        config: the config's keys in the usual spelling, with at least max_position_embeddings.
        head_dim: elements of a head.
        aliases: names of scalings that mean another one in this family.
        windows: layers with a window may have parameters of their own: elements of their heads; 0: they may not.

    Raises:
        UnsupportedError: a scaling that cannot be expressed, by name.
        ModelFormatError: a missing or absurd parameter.
    """
    if windows and not config.get("rope_scaling"):
        require_kinds_of_layers(config.get("rope_parameters") or {})
    full, windowed = _of_layers(config)
    if windowed is not None and not windows:
        raise UnsupportedError("config.json: rope_parameters that differ between layers are not supported")
    p = _Parameters(config, full, aliases)
    share = p.number("partial_rotary_factor", 1.0)
    n_rot = head_dim if p.kind == "proportional" else int(head_dim * min(share, 2.0))
    if n_rot % 2 or not 2 <= n_rot <= head_dim:
        raise ModelFormatError(
            f"config.json: RoPE's partial_rotary_factor {share:g} turns {n_rot} of a head's {head_dim} dimensions; it "
            f"must be an even number of them, from 2 to {head_dim}"
        )
    fields = {
        "rope.dimension_count": uint32(n_rot),
        "rope.freq_base": float32(p.number("rope_theta", 10000.0)),
    }
    if windowed is not None:
        own = _Parameters(config, windowed, aliases)
        if own.kind != "default":
            raise UnsupportedError(f"config.json: RoPE scaling '{own.kind}' of layers with a window is not supported")
        fields["rope.freq_base_swa"] = float32(own.number("rope_theta", 10000.0))
        if windows != head_dim:
            fields["rope.dimension_count_swa"] = uint32(windows)
    if p.kind == "default":
        return fields, []
    if p.kind not in _SCALINGS:
        raise UnsupportedError(
            f"config.json: RoPE scaling '{p.kind}' is not supported; supported are: {', '.join(_SCALINGS)}"
        )
    scaling, tensors = _SCALINGS[p.kind](p, n_rot)
    return fields | {f"rope.scaling.{key}": value for key, value in scaling.items()}, tensors


_Scaling = tuple[dict[str, GGUFValue], list[Tensor]]


def _linear(p: _Parameters, n_rot: int) -> _Scaling:
    return {"type": string("linear"), "factor": float32(p.number("factor"))}, []


def _dynamic(p: _Parameters, n_rot: int) -> _Scaling:
    if p.number("factor", 1.0) != 1:
        raise UnsupportedError(
            "config.json: RoPE scaling 'dynamic' turns the positions already cached anew whenever the context grows "
            f"past {p.get('max_position_embeddings')}, which GGUF cannot say; without rope_scaling in config.json the "
            "model is the same up to that many positions"
        )
    return {}, []


def _llama3(p: _Parameters, n_rot: int) -> _Scaling:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, a ramp between; kept as divisors."""
    wavelength = 2 * math.pi * p.number("rope_theta", 10000.0) ** (np.arange(0, n_rot, 2) / n_rot)
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    if not low < high:
        raise ModelFormatError(f"config.json: RoPE's low_freq_factor {low} is not below high_freq_factor {high}")
    kept = np.clip((p.original_context() / wavelength - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - kept) / p.number("factor") + kept)
    return {}, [Tensor.of("rope_freqs.weight", divisors)]


def _proportional(p: _Parameters, n_rot: int) -> _Scaling:
    """Gemma 4: of a head's pairs only the first turn, as fast as if all did; the others' divisors are huge."""
    turning = int(p.number("partial_rotary_factor", 1.0) * n_rot // 2)
    divisors = np.where(np.arange(n_rot // 2) < turning, p.number("factor", 1.0), 1e30)
    return {}, [Tensor.of("rope_freqs.weight", divisors)]


def _yarn(p: _Parameters, n_rot: int) -> _Scaling:
    """YaRN (Peng et al. 2023). GGUF's attn_factor multiplies the paper's own 1 + 0.1 ln s, by which what rotates grows;
    with a yarn_log_multiplier scores do, by its square."""
    if not p.get("truncate", True):  # null means false, too
        raise UnsupportedError("config.json: YaRN with truncate = false is not supported")
    factor = p.number("factor")

    def magnitude(scale: float) -> float:
        return 1 + 0.1 * scale * math.log(max(factor, 1.0))

    wanted = magnitude(1)
    if p.get("attention_factor") is not None:
        wanted = p.number("attention_factor")
    elif p.get("mscale") and p.get("mscale_all_dim"):
        wanted = magnitude(p.number("mscale")) / magnitude(p.number("mscale_all_dim"))
    fields = {
        "type": string("yarn"),
        "factor": float32(factor),
        "original_context_length": uint32(int(p.original_context())),
        "yarn_beta_fast": float32(p.number("beta_fast", 32.0)),
        "yarn_beta_slow": float32(p.number("beta_slow", 1.0)),
    }
    pairs = [
        n_rot * math.log(p.original_context() / (beta * 2 * math.pi)) / (2 * math.log(p.number("rope_theta", 10000.0)))
        for beta in (p.number("beta_fast", 32.0), p.number("beta_slow", 1.0))
    ]
    if max(math.floor(pairs[0]), 0) > min(math.ceil(pairs[1]), n_rot - 1):
        raise UnsupportedError(
            "config.json: YaRN whose beta_fast and beta_slow leave no pairs between is not supported"
        )
    if (of_scores := p.get("yarn_log_multiplier")) is not None:
        if wanted != 1:
            raise UnsupportedError("config.json: YaRN whose mscale and mscale_all_dim differ is not supported here")
        fields["yarn_log_multiplier"] = float32(of_scores)
    elif wanted != magnitude(1):
        fields["attn_factor"] = float32(wanted / magnitude(1))
    return fields, []


def _longrope(p: _Parameters, n_rot: int) -> _Scaling:
    """Phi-3's longrope: a divisor for each pair, one set up to the original context and one past it."""
    original = p.original_context()
    stretch = p.number("factor", p.stretch())
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    if (magnitude := p.get("short_mscale")) is not None:  # Phi-3.5-MoE's
        if magnitude != p.get("long_mscale"):
            raise UnsupportedError("config.json: longrope whose short_mscale and long_mscale differ is not supported")
        usual = p.number("short_mscale")
    fields = {
        "type": string("longrope"),
        "original_context_length": uint32(int(original)),
        "attn_factor": float32(p.number("attention_factor", usual)),
    }
    return fields, [
        Tensor.of(f"rope_factors_{name}.weight", p.factors(f"{name}_factor", n_rot // 2)) for name in ("long", "short")
    ]


_SCALINGS = {
    "linear": _linear,
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}
