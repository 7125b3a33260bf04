"""What `slimrt convert` adds to a model for a cache mode, random: names, types and sizes are a converted file's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf

if TYPE_CHECKING:
    import models

Type = gguf.GGMLQuantizationType
Layout = dict[str, tuple[Type, int, int]]  # name -> (type, rows, cols); rows 0: a float32 vector


@dataclass(frozen=True)
class Cache:
    """A cache of all layers.

    Attributes:
        mode, type: as slimrt.Model takes them.
        rank, residual_type: of the residual of k+r; 0 and "" of others.
    """

    mode: str
    type: str = "f16"
    rank: int = 0
    residual_type: str = ""

    @classmethod
    def of(cls, text: str, shape: models.Shape) -> Cache:
        """From MODE[:TYPE[:RESIDUAL/PART]]: "k+r:q8" has the residual that a conversion writes, "k+r:q8:q8/8" one in q8
        an eighth as wide as V."""
        from slimrt.modes import default_residual

        mode, _, rest = text.partition(":")
        type, _, residual = rest.partition(":")
        rank, residual_type = default_residual(mode, type or "f16", shape.kv_width)
        if residual:
            residual_type, _, part = residual.partition("/")
            rank = shape.kv_width // int(part)
        return cls(mode, type or "f16", rank, residual_type)

    @property
    def file_name(self) -> str:
        """Of what tells a model's file from that of another cache; "" where it is the plain one."""
        if self.mode == "k+r":
            return f".k+r-{self.type}-{self.residual_type}-{self.rank}"
        return f".{self.mode}" if self.mode in ("k", "lowrank") else ""


def tensors(shape: models.Shape, cache: Cache) -> Layout:
    width, d, rank = shape.kv_width, shape.d_model, cache.rank
    floats = ("f32", "f16", "bf16")
    residual = Type.F32 if cache.type in floats or cache.residual_type in floats else Type.F16
    residual_of_x = residual if cache.residual_type == "q4" else Type.F32
    latent = min(4, shape.n_kv_heads) * d // shape.n_heads
    of_layer: dict[str, Layout] = {
        "k": {"attn_kv.weight": (Type.F32, width, width)},
        "k+r": {
            "attn_kr_x.weight": (residual_of_x, rank, d),
            "attn_kr_k.weight": (residual, rank, width),
            "attn_kr_out.weight": (residual, width, rank),
        },
        "lowrank": {
            "attn_v_latent.weight": (Type.F32, width, latent),
            "attn_v_expand.weight": (Type.F32, width, latent),
        },
    }
    layer = of_layer.get(cache.mode, {})
    if cache.mode == "k+r" and cache.type in floats:
        layer["attn_kr_v.weight"] = (Type.F32, width, width)
    elif cache.mode == "k+r":  # halved, a scale a row; and what makes the row's channels alike
        layer["attn_kr_v.weight"] = (Type.F16, width, width)
        layer |= {name: (Type.F32, 0, width) for name in ("attn_kr_v.scale", "attn_kr_row.scale")}
    return {f"blk.{i}.{name}": tensor for i in range(shape.n_layers) for name, tensor in layer.items()}


def write_fields(writer: gguf.GGUFWriter, shape: models.Shape, cache: Cache) -> None:
    """What the file says of the cache."""
    said = {"modes": cache.mode, "types": cache.type}
    if cache.mode == "k+r":
        said["residual_types"] = cache.residual_type
        writer.add_array("slimrt.cache.ranks", [cache.rank] * shape.n_layers)
    for key, value in said.items():
        writer.add_array(f"slimrt.cache.{key}", [value] * shape.n_layers)
