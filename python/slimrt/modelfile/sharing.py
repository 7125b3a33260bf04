# SPDX-License-Identifier: Apache-2.0
"""Layers that read another layer's K and V: which layer's, and which form of K (docs/cache-math.md, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt.modelfile.gguf import ModelData, array, string

OWNERS, KEYS = "slimrt.cache.owners", "slimrt.cache.shared_keys"
NOT_UPTRAINED = "slimrt.sharing.not_uptrained"


@dataclass(frozen=True)
class Sharing:
    """How the layers of a family share K and V.

    Attributes:
        keys: which form of an owner's K its readers use. "unrotated": K before RoPE, without rotating it; "raw": K
            before norm and RoPE, which each reader applies itself; "rotated": K after RoPE, as the owner uses it.
        owners: function from the values of config.json to the layer that each layer reads, itself or an earlier one;
            raises ValueError for invalid values.
    """

    keys: str
    owners: Callable[[Mapping[str, Any]], list[int]]


def spread_owners(n_layers: int, n_owners: int) -> list[int]:
    """MLKV's rule (Zuhri et al., 2024): layer 0 and every (n_layers / n_owners)-th layer own K and V, the others read
    the last owner before them.

    Raises:
        ValueError: not from 1 to n_layers owners.
    """
    if not 1 <= n_owners <= n_layers:
        raise ValueError(f"{n_owners} layers with K and V of their own, and the model has {n_layers} layers")
    # In floats, as published: if n_owners does not divide n_layers, exact arithmetic may give another layer.
    owners = {0, *(int((i + 1) * (n_layers / n_owners)) for i in range(n_owners - 1))}
    return [max(owner for owner in owners if owner <= layer) for layer in range(n_layers)]


def _mlkv(values: Mapping[str, Any]) -> list[int]:
    n_layers = _size(values, "num_hidden_layers")
    said = values.get("num_key_value_layers") is not None
    return spread_owners(n_layers, _size(values, "num_key_value_layers") if said else n_layers)


def _cla(values: Mapping[str, Any]) -> list[int]:
    """Cross-layer attention (Brandon et al., 2024): the first of cla_share_factor neighbouring layers owns K and V."""
    factor = _size(values, "cla_share_factor")
    return [layer - layer % factor for layer in range(_size(values, "num_hidden_layers"))]


def _last_of_its_type(values: Mapping[str, Any]) -> list[int]:
    """Gemma 3n: the last num_kv_shared_layers layers read the last layer before these of the same attention type."""
    n_layers, types = _size(values, "num_hidden_layers"), values.get("layer_types")
    if not isinstance(types, list) or len(types) != n_layers:
        raise ValueError(f"layer_types is {types!r}, not one name for each of {n_layers} layers")
    own = n_layers - (_size(values, "num_kv_shared_layers") if values.get("num_kv_shared_layers") else 0)
    last = {kind: layer for layer, kind in enumerate(types[: max(own, 0)])}
    if missing := [kind for kind in types[max(own, 0) :] if kind not in last]:
        raise ValueError(f"num_kv_shared_layers leaves no layer of type {missing[0]!r} with K and V of its own")
    return [layer if layer < own else last[kind] for layer, kind in enumerate(types)]


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a number of layers")
    return value


SHARING = {
    "mlkv": Sharing("unrotated", _mlkv),
    "cla": Sharing("raw", _cla),
    "gemma3n": Sharing("rotated", _last_of_its_type),
}


def owners_of(model: ModelData) -> list[int]:
    """For each layer of a decoder, the layer whose rows it reads; itself unless K and V are shared."""
    n_layers = model.size("decoder_block_count", model.size("block_count"))
    return list(model.value(OWNERS, range(n_layers)))


def sharing_fields(owners: list[int], keys: str) -> dict[str, GGUFValue]:
    """Metadata of a model with these owners and form of keys; {} if each layer reads its own rows."""
    if owners == list(range(len(owners))):
        return {}
    return {OWNERS: array(owners, GGUFValueType.UINT32), KEYS: string(keys)}
