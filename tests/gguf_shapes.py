# SPDX-License-Identifier: Apache-2.0
"""GGUF files of any shape: sparse ones of real models' shapes for the planner, tiny ones to break."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

EXPERTS = 3  # of "olmoe", of which a token takes two
BIASED = ("gpt2", "gptneox", "phi2")  # with LayerNorm and biases everywhere
TYPE = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16}


@dataclass
class Shape:
    """A model by its sizes, in the layout of an architecture (one that is not here: Llama's)."""

    d: int
    n_layers: int
    n_heads: int
    n_ctx: int
    n_kv_heads: int = 0  # 0: as many as n_heads
    head_dim: int = 0  # 0: d / n_heads
    d_ff: int = 64
    n_vocab: int = 64
    arch: str = "llama"
    dtype: str = "f16"

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def dk(self) -> int:
        return self.head_dim or self.d // self.n_heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """name -> shape, outermost first."""
        q, kv = self.n_heads * self.dk, self.kv_heads * self.dk
        gpt2, biased = self.arch == "gpt2", self.arch in BIASED
        norms = {"phi2": ("attn_norm",), "olmo2": ("post_attention_norm", "post_ffw_norm")}
        norms["gemma2"] = norms["gemma3"] = norms["gemma4"] = ("attn_norm", "ffn_norm", *norms["olmo2"])
        layer: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (self.d,) for name in norms.get(self.arch, ("attn_norm", "ffn_norm"))
        }
        if self.arch in ("gpt2", "gptneox"):
            layer |= {"attn_qkv.weight": (q + 2 * kv, self.d)}
        else:
            layer |= {"attn_q.weight": (q, self.d), "attn_k.weight": (kv, self.d), "attn_v.weight": (kv, self.d)}
        if self.arch in ("olmo2", "olmoe"):
            layer |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
        if self.arch in ("qwen3", "gemma3", "gemma4"):
            layer |= {"attn_q_norm.weight": (self.dk,), "attn_k_norm.weight": (self.dk,)}
        if not biased:
            layer |= {"ffn_gate.weight": (self.d_ff, self.d)}
        layer |= {
            "attn_output.weight": (self.d, q),
            "ffn_up.weight": (self.d_ff, self.d),
            "ffn_down.weight": (self.d, self.d_ff),
        }
        if self.arch == "olmoe":
            networks = {name: layer.pop(f"ffn_{name}.weight") for name in ("gate", "up", "down")}
            layer |= {f"ffn_{name}_exps.weight": (EXPERTS, *dims) for name, dims in networks.items()}
            layer["ffn_gate_inp.weight"] = (EXPERTS, self.d)
        out: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.n_vocab, self.d), "output_norm.weight": (self.d,)}
        if biased:
            layer |= {name.replace("weight", "bias"): shape[:1] for name, shape in layer.items()}
            out |= {"output_norm.bias": (self.d,)}
        if gpt2:
            out |= {"position_embd.weight": (self.n_ctx, self.d)}
        if self.arch == "phi2":
            out |= {"output.weight": (self.n_vocab, self.d), "output.bias": (self.n_vocab,)}
        return out | {f"blk.{i}.{name}": shape for i in range(self.n_layers) for name, shape in layer.items()}


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Writes everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def finish_sparse(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Writes what was said of the tensors (add_tensor_info); their data is a hole of its full size, all zero."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    sizes = [info.nbytes for part in writer.tensors for info in part.values()]
    writer.close()
    with path.open("r+b") as file:
        file.truncate(sum(-(-size // 32) * 32 for size in (path.stat().st_size, *sizes)))
    return path


def header(path: Path, shape: Shape, changes: dict[str, object] | None = None) -> gguf.GGUFWriter:
    """A writer with the metadata; changes: key -> another value (None: left out); "slimrt." keys as they are."""
    writer = gguf.GGUFWriter(path, shape.arch)
    epsilon = "layer_norm_epsilon" if shape.arch in BIASED else "layer_norm_rms_epsilon"
    values: dict[str, object] = {
        "context_length": shape.n_ctx,
        "embedding_length": shape.d,
        "block_count": shape.n_layers,
        "feed_forward_length": shape.d_ff,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.kv_heads,
        f"attention.{epsilon}": 1e-5,
    }
    if shape.arch == "gemma2":
        caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}
        values |= {"attention.sliding_window": 9, **caps}
    if shape.arch == "olmoe":
        values |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if shape.head_dim:
        values |= {"attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim}
    for key, value in (values | (changes or {})).items():
        name = key if key.startswith("slimrt.") else f"{shape.arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
    return writer


def write_sparse(path: Path, shape: Shape, changes: dict[str, object] | None = None) -> Path:
    """A file of the model's full size that takes next to no disk: its data is a hole."""
    writer = header(path, shape, changes)
    for name, dims in shape.tensors().items():
        dtype = TYPE["f32" if len(dims) == 1 else shape.dtype]
        n_bytes = int(np.prod(dims)) * gguf.GGML_QUANT_SIZES[dtype][1]
        writer.add_tensor_info(name, dims, np.dtype(np.float32 if dtype == TYPE["f32"] else np.float16), n_bytes)
    return finish_sparse(writer, path)


def write_random(
    path: Path,
    shape: Shape,
    changes: dict[str, object] | None = None,
    edit: dict[str, np.ndarray | None] | None = None,
    name: str = "",
) -> Path:
    """A small model with random weights. edit: tensor name -> what to write instead (None: leave it out)."""
    writer, random = header(path, shape, changes), np.random.default_rng(0)
    if name:
        writer.add_name(name)
    tensors: dict[str, np.ndarray | None] = {
        name: (0.2 * random.normal(size=dims) + (len(dims) == 1)).astype(np.float32 if len(dims) == 1 else np.float16)
        for name, dims in shape.tensors().items()
    }
    for name, data in (tensors | (edit or {})).items():
        if data is not None:
            writer.add_tensor(name, data)
    return finish(writer, path)
