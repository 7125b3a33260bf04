# SPDX-License-Identifier: Apache-2.0
"""Models whose layers share K and V, as Hugging Face directories and as a forward pass over a whole text in float64.

Written from the papers' descriptions, on the tensors of the directory: nothing is cached, nothing of slimrt is used.
"""

from __future__ import annotations

import json
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float64]
Tensors = dict[str, NDArray[Any]]

NEOX = {
    "model_type": "gpt_neox", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
    "intermediate_size": 48, "hidden_act": "gelu", "rotary_pct": 0.5, "rotary_emb_base": 100, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 128, "use_parallel_residual": True, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "hidden_act": "silu", "rope_theta": 100.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def mlkv(owners: int, heads: int, **changes: Any) -> dict[str, Any]:
    """The config of a GPT-NeoX with K and V in so many layers, and so many heads there."""
    return NEOX | {"num_key_value_layers": owners, "num_key_value_heads": heads} | changes


def cla(factor: int, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"use_cla": True, "cla_share_factor": factor} | changes


def owners_of(config: dict[str, Any]) -> list[int]:
    """By section 5 of the design, one layer after the other."""
    n = config["num_hidden_layers"]
    if config["model_type"] == "llama":
        return [i - i % config["cla_share_factor"] for i in range(n)]
    m = config["num_key_value_layers"]
    own = {0} | {(i + 1) * n // m for i in range(m - 1)}
    last, owners = 0, []
    for i in range(n):
        last = i if i in own else last
        owners.append(last)
    return owners


def tensors_of(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random weights by their Hugging Face names, float32."""
    random, made = np.random.default_rng(seed), Tensors()
    d, ff, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    neox = config["model_type"] == "gpt_neox"

    def add(name: str, out: int, wide: int = 0, *, biased: bool = neox) -> None:
        shape = (out, wide) if wide else (out,)
        made[f"{name}.weight"] = (random.normal(size=shape) * 0.2 + (not wide)).astype(np.float32)
        if biased:
            made[f"{name}.bias"] = (0.3 * random.normal(size=out)).astype(np.float32)

    for i, owner in enumerate(owners_of(config)):
        at = f"gpt_neox.layers.{i}." if neox else f"model.layers.{i}."
        q, k, w, o = (
            ("attention.query", "attention.key", "attention.value", "attention.dense")
            if neox
            else tuple(f"self_attn.{x}_proj" for x in "qkvo")
        )
        add(at + "input_layernorm", d)
        add(at + "post_attention_layernorm", d)
        add(at + q, d, d)
        add(at + o, d, d)
        if owner == i:
            add(at + k, kv, d)
            add(at + w, kv, d)
        for name, shape in _ffn(neox, d, ff).items():
            add(at + name, *shape)
    add("gpt_neox.embed_in" if neox else "model.embed_tokens", v, d, biased=False)
    add("gpt_neox.final_layer_norm" if neox else "model.norm", d)
    add("embed_out" if neox else "lm_head", v, d, biased=False)
    return made


def _ffn(neox: bool, d: int, ff: int) -> dict[str, tuple[int, int]]:
    if neox:
        return {"mlp.dense_h_to_4h": (ff, d), "mlp.dense_4h_to_h": (d, ff)}
    return {"mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff)}


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits(config: dict[str, Any], tensors: Tensors, ids: NDArray[Any]) -> Array:
    """[n, vocab]: every layer of the whole text after the other."""
    neox = config["model_type"] == "gpt_neox"
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    stem = "gpt_neox." if neox else "model."
    x = w[stem + ("embed_in.weight" if neox else "embed_tokens.weight")][ids]
    shared: tuple[Array, Array] | None = None
    for i, owner in enumerate(owners_of(config)):
        at = f"{stem}layers.{i}."
        h = _norm(config, w, at + "input_layernorm", x)
        if owner == i:
            k, v = ("attention.key", "attention.value") if neox else ("self_attn.k_proj", "self_attn.v_proj")
            shared = _linear(w, at + k, h), _linear(w, at + v, h)
        assert shared is not None
        attended = _attention(config, w, at, h, *shared, rotates=owner == i or not neox)
        parallel = neox and config["use_parallel_residual"]
        h = _norm(config, w, at + "post_attention_layernorm", x if parallel else x + attended)
        x = x + attended + _mlp(neox, w, at, h)
    x = _norm(config, w, stem + ("final_layer_norm" if neox else "norm"), x)
    return x @ w["embed_out.weight" if neox else "lm_head.weight"].T


def _attention(config, w, at: str, h: Array, k: Array, v: Array, *, rotates: bool) -> Array:
    """A layer's queries, rotated, over K and V of its owner: K is rotated by MLKV's owners and by all layers of CLA."""
    n_heads, neox = config["num_attention_heads"], config["model_type"] == "gpt_neox"
    n, d = h.shape
    dim, group = d // n_heads, n_heads // config["num_key_value_heads"]
    q = _linear(w, at + ("attention.query" if neox else "self_attn.q_proj"), h).reshape(n, n_heads, dim)
    k, v = k.reshape(n, -1, dim), v.reshape(n, -1, dim)
    n_rot = int(dim * config.get("rotary_pct", 1.0))
    base = config["rotary_emb_base"] if neox else config["rope_theta"]
    q, k = _rotated(q, n_rot, base), _rotated(k, n_rot, base) if rotates else k
    out = np.empty_like(q)
    for head in range(n_heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(dim)
        scores[np.triu_indices(n, 1)] = -np.inf
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, head // group]
    return _linear(w, at + ("attention.dense" if neox else "self_attn.o_proj"), out.reshape(n, d))


def _rotated(x: Array, n_rot: int, base: float) -> Array:
    """Dimension i of the first n_rot together with i + n_rot / 2."""
    half = n_rot // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:n_rot]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate([*turned, x[..., n_rot:]], axis=-1)


def _linear(w, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _norm(config, w, name: str, x: Array) -> Array:
    if config["model_type"] == "llama":
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["layer_norm_eps"])
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def _mlp(neox: bool, w, at: str, h: Array) -> Array:
    if neox:
        up = _linear(w, at + "mlp.dense_h_to_4h", h)
        return _linear(w, at + "mlp.dense_4h_to_h", 0.5 * up * (1 + np.vectorize(erf)(up / np.sqrt(2))))
    gate = _linear(w, at + "mlp.gate_proj", h)
    return _linear(w, at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(w, at + "mlp.up_proj", h))
