# SPDX-License-Identifier: Apache-2.0
"""Reads a model for reference.py from a GGUF file or a Hugging Face directory, without slimrt."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from reference import Layer, Weights
from reference_experts import beside_of_gguf, experts_of_gguf, experts_of_hf
from reference_formats import Array
from reference_latent import latent_of_gguf, score_scale
from reference_rope import Rope, yarn


def load(path: str | Path, n_ctx: int = 0) -> Weights:
    """n_ctx (0: the trained one) chooses between longrope's two tables."""
    return load_hf(Path(path), n_ctx) if Path(path).is_dir() else load_gguf(Path(path), n_ctx)


# ---------------------------------------------------------------- GGUF
def load_gguf(path: Path, n_ctx: int) -> Weights:
    reader = gguf.GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    arch = meta["general.architecture"]
    tensors = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in reversed(t.shape)))
        for t in reader.tensors
    }
    tensors = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def key(name: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{name}", default)

    d_model, n_heads = key("embedding_length"), key("attention.head_count")
    each_kv = key("attention.head_count_kv", n_heads)
    n_kv_heads = each_kv[0] if isinstance(each_kv, list) else each_kv
    head_dim = key("attention.key_length", d_model // n_heads)
    layer_norm = key("attention.layer_norm_epsilon")
    if layer_norm is not None:
        tensors = _whole_norms(tensors, arch, key("block_count"), d_model)
    layers = []
    for i in range(key("block_count") - key("nextn_predict_layers", 0)):
        prefix = f"blk.{i}."
        part = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        if arch in FFN_NORM:
            part["ffn_norm.weight"] = part.pop(FFN_NORM[arch])
        latent = latent_of_gguf(part, key, meta)
        layers.append(_layer(part, n_heads * head_dim, n_kv_heads * head_dim))
        layers[-1].latent, layers[-1].experts = latent, experts_of_gguf(part, key, arch)
        layers[-1].beside = beside_of_gguf(part)
        layers[-1].n_kv_heads = each_kv[i] if isinstance(each_kv, list) else 0
        layers[-1].norms_v = arch == "gemma4"
        if "inp_gate.weight" in part:
            width = part["inp_gate.weight"].shape[0]
            own = slice(i * width, (i + 1) * width)
            layers[-1].embd = tensors["per_layer_token_embd.weight"][:, own]
            layers[-1].embd_proj = tensors["per_layer_model_proj.weight"][own]
            layers[-1].embd_proj_norm = tensors["per_layer_proj_norm.weight"]
            layers[-1].embd_gate, layers[-1].embd_out = part["inp_gate.weight"], part["proj.weight"]
            layers[-1].embd_post_norm = part["post_norm.weight"]
    windows = _windows_of_gguf(key, arch, len(layers))
    for i, layer in enumerate(layers):
        layer.window = windows[i]
        if _knows_positions(arch, i, windows):
            dim = key("attention.key_length_swa", head_dim) if windows[i] else head_dim
            layer.rope = _rope_of_gguf(key, tensors, dim, arch, n_ctx, windowed=windows[i] > 0)
    embed = tensors["token_embd.weight"]
    shared = key("attention.shared_kv_layers", 0)
    return Weights(
        n_heads,
        n_kv_heads if latent is None else n_heads,
        eps=key("attention.layer_norm_rms_epsilon") if layer_norm is None else layer_norm,
        activation=meta.get("slimrt.activation", ACTIVATIONS.get(arch, "silu")),
        embed=embed,
        layers=layers,
        norm=tensors["output_norm.weight"],
        norm_b=tensors.get("output_norm.bias"),
        head=tensors.get("output.weight", embed),
        head_b=tensors.get("output.bias"),
        parallel=key("use_parallel_residual", True) if arch == "gptneox" else arch in ("phi2", "command-r", "cohere2"),
        positions=tensors.get("position_embd.weight"),
        embed_norm=tensors.get("token_embd_norm.weight"),
        embed_norm_b=tensors.get("token_embd_norm.bias"),
        embed_scale=sqrt(d_model) if arch.startswith("gemma") else key("embedding_scale", 1.0),
        residual_scale=key("residual_scale", 1.0),
        score_scale=key("attention.scale", 1.0 if arch == "gemma4" else 0.0) if latent is None else score_scale(key),
        logit_scale=1 / key("logit_scale", 1.0)
        if arch in ("granite", "granitemoe", "minicpm", "minicpm3")
        else key("logit_scale", 1.0),
        clamp=key("attention.clamp_kqv", 0.0),
        query_growth=key("attention.temperature_scale", 0.0),
        query_growth_length=key("attention.temperature_length", key("rope.scaling.original_context_length", 1)),
        qk_layer_norm=layer_norm is not None,
        score_cap=key("attn_logit_softcapping", 0.0),
        logit_cap=key("final_logit_softcapping", 0.0),
        owners=_last_of_its_kind(windows, len(layers) - shared) if shared else None,
        slopes=_slopes(n_heads, key("attention.max_alibi_bias", 8.0)) if arch in ("bloom", "mpt") else None,
    )


# Where the file does not say.
ACTIVATIONS = {"gpt2": "gelu_tanh", "gptneox": "gelu_erf", "phi2": "gelu_tanh", "gemma": "gelu_tanh"}
ACTIVATIONS |= {"bloom": "gelu_tanh", "mpt": "gelu_erf", "opt": "relu", "gemma2": "gelu_tanh", "gemma3": "gelu_tanh"}
ACTIVATIONS |= {"gpt-oss": "clamped_swish", "gemma4": "gelu_tanh"}
FFN_NORM = {"gpt-oss": "post_attention_norm.weight"}  # what the norm of the FFN's input is called
WITHOUT_ROPE = ("gpt2", "bloom", "mpt", "opt")
# The others have windows in all layers.
FULL_EVERY = {"gemma2": 2, "gpt-oss": 2, "gemma3": 6, "gemma4": 6, "olmo2": 4, "cohere2": 4, "exaone4": 4}
# The base of their windows' own RoPE; None: that of the others.
WINDOWS_ROPE = {"gemma3": 10000.0, "gemma4": 10000.0, "olmo2": None}
INTERLEAVED = (
    "llama",
    "olmo",
    "command-r",
    "granite",
    "granitemoe",
    "minicpm",
    "glm4",
    "deepseek",
    "cohere2",
    "smollm3",
    "mistral3",
    "deepseek2",
    "mistral4",
)  # RoPE turns neighbours


def _last_of_its_kind(windows: list[int], own: int) -> list[int]:
    """Whose rows each layer reads where only the first ones have their own."""
    last = {window: i for i, window in enumerate(windows[:own])}
    return [i if i < own else last[window] for i, window in enumerate(windows)]


def _windows_of_gguf(key: Any, arch: str, n_layers: int) -> list[int]:
    window, period = key("attention.sliding_window", 0) or 0, FULL_EVERY.get(arch, n_layers + 1)
    pattern = key("attention.sliding_window_pattern", period)
    sliding = [(i + 1) % pattern != 0 for i in range(n_layers)] if isinstance(pattern, int) else pattern
    return [window if slides else 0 for slides in sliding]


def _knows_positions(arch: str, i: int, windows: list[int]) -> bool:
    if arch in ("cohere2", "exaone4"):  # with windows, only there
        return windows[i] > 0 or not any(windows)
    return arch not in WITHOUT_ROPE and not (arch == "smollm3" and i % 4 == 3)


def _whole_norms(tensors: dict[str, Array], arch: str, n_layers: int, d_model: int) -> dict[str, Array]:
    """LayerNorms with ones and zeros for the weights and biases that they do not have."""
    names = {
        name.rpartition(".")[0]
        for name in tensors
        if "norm" in name and not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    if arch == "olmo":
        names |= {"output_norm", *(f"blk.{i}.{name}" for i in range(n_layers) for name in ("attn_norm", "ffn_norm"))}
    whole = {f"{name}.weight": np.ones(d_model) for name in names} | {
        f"{name}.bias": np.zeros(d_model) for name in names
    }
    return whole | tensors


def _slopes(n_heads: int, steepest: float) -> Array:
    """ALiBi's: of a power of two heads a geometric sequence, of other numbers that of the next lower one, then every
    other element of the next higher one's."""

    def sequence(n: int) -> list[float]:
        return [2 ** (-steepest * (i + 1) / n) for i in range(n)]

    lower = 2 ** int(np.log2(n_heads))
    return np.array(sequence(lower) + sequence(2 * lower)[0::2][: n_heads - lower])


def _rope_of_gguf(key: Any, tensors: dict[str, Array], head_dim: int, arch: str, n_ctx: int, windowed: bool) -> Rope:
    if windowed and arch in WINDOWS_ROPE:
        base = key("rope.freq_base_swa", WINDOWS_ROPE[arch] or key("rope.freq_base"))
        return Rope(base ** (-np.arange(0, head_dim, 2) / head_dim), interleaved=False)
    n_rot = key("rope.dimension_count", head_dim)
    base = key("rope.freq_base", 10000.0)
    inv_freq = base ** (-np.arange(0, n_rot, 2) / n_rot)
    kind, factor = key("rope.scaling.type", "none"), key("rope.scaling.factor", 1.0)
    original = key("rope.scaling.original_context_length", key("context_length"))
    scale = key("rope.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in tensors:
        inv_freq = inv_freq / tensors["rope_freqs.weight"]
    if "rope_factors_long.weight" in tensors:
        which = "long" if (n_ctx or key("context_length")) > original else "short"
        inv_freq = inv_freq / tensors[f"rope_factors_{which}.weight"]
        scale = key("rope.scaling.attn_factor", sqrt(1 + log(key("context_length") / original) / log(original)))
    if kind == "linear":
        inv_freq = inv_freq / factor
    if kind == "yarn":
        fast, slow = key("rope.scaling.yarn_beta_fast", 32.0), key("rope.scaling.yarn_beta_slow", 1.0)
        inv_freq = yarn(inv_freq, factor, original, base, fast, slow, whole_ramp=arch != "gpt-oss")
        usual = 0.1 * log(factor) + 1
        whole = key("rope.scaling.yarn_attn_factor", usual)
        whole = usual if abs(whole * usual - 1) < 1e-3 else whole
        scale = 1.0 if arch in ("deepseek2", "mistral4") else key("rope.scaling.attn_factor", whole / usual) * usual
    return Rope(inv_freq, interleaved=arch in INTERLEAVED, scale=scale)


def _layer(part: dict[str, Array], q_rows: int, kv_rows: int) -> Layer:
    """A layer from its tensors by GGUF name, with fused tensors taken apart."""
    part = dict(part)
    for kind in ("weight", "bias"):
        if (fused := part.pop(f"attn_qkv.{kind}", None)) is not None:
            names = (f"attn_{n}.{kind}" for n in "qkv")
            part.update(zip(names, np.split(fused, [q_rows, q_rows + kv_rows]), strict=True))
    down = part.get("ffn_down.weight")
    if down is not None and "ffn_gate.weight" not in part and len(part["ffn_up.weight"]) == 2 * down.shape[1]:
        part["ffn_gate.weight"], part["ffn_up.weight"] = np.split(part["ffn_up.weight"], 2)
    return Layer(
        attn_norm=part.get("attn_norm.weight"),
        attn_norm_b=part.get("attn_norm.bias"),
        attn_post_norm=part.get("post_attention_norm.weight"),
        q_norm=part.get("attn_q_norm.weight"),
        k_norm=part.get("attn_k_norm.weight"),
        wq=part["attn_q.weight"],
        wk=part.get("attn_k.weight"),  # none where another's rows are read
        wv=part.get("attn_v.weight", part.get("attn_k.weight")),
        v_is_k="attn_k.weight" in part and "attn_v.weight" not in part,
        scale=float(part.get("layer_output_scale.weight", np.ones(1))[0]),
        wo=part["attn_output.weight"],
        bq=part.get("attn_q.bias"),
        bk=part.get("attn_k.bias"),
        bv=part.get("attn_v.bias"),
        bo=part.get("attn_output.bias"),
        ffn_norm=part.get("ffn_norm.weight", part.get("attn_norm.weight")),  # Phi-2 shares one
        ffn_norm_b=part.get("ffn_norm.bias", part.get("attn_norm.bias")),
        ffn_post_norm=part.get("post_ffw_norm.weight"),
        gate=part.get("ffn_gate.weight"),
        gate_b=part.get("ffn_gate.bias"),
        up=part.get("ffn_up.weight"),
        up_b=part.get("ffn_up.bias"),
        down=down,
        down_b=part.get("ffn_down.bias"),
        attn_sub_norm=part.get("attn_sub_norm.weight"),
        sinks=part.get("attn_sinks.weight"),
        ffn_sub_norm=part.get("ffn_sub_norm.weight"),
    )


# ---------------------------------------------------------------- Hugging Face directories
LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


QWEN3_NAMES = LLAMA_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
OLMO2_NAMES = {name: ours for name, ours in LLAMA_NAMES.items() if not name.endswith("layernorm")} | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
QK_NORM_NAMES = LLAMA_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
PHI_NAMES = {name: ours for name, ours in LLAMA_NAMES.items() if name.startswith(("self_attn", "input"))} | {
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
GPT_NEOX_NAMES = {
    "input_layernorm": "attn_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
# Stem of the layers' names, their names, embedding, last norm, head.
LAYOUTS = {
    "gpt2": ("transformer.h.", GPT2_NAMES, "transformer.wte", "transformer.ln_f", "lm_head"),
    "gpt_neox": ("gpt_neox.layers.", GPT_NEOX_NAMES, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
    "olmoe": ("model.layers.", QK_NORM_NAMES, "model.embed_tokens", "model.norm", "lm_head"),
    "phi": ("model.layers.", PHI_NAMES, "model.embed_tokens", "model.final_layernorm", "lm_head"),
    "qwen3": ("model.layers.", QWEN3_NAMES, "model.embed_tokens", "model.norm", "lm_head"),
    "olmo2": ("model.layers.", OLMO2_NAMES, "model.embed_tokens", "model.norm", "lm_head"),
}
LAYOUTS_OF_LLAMA = ("llama", "mistral", "qwen2", "phi3")
LLAMA_LAYOUT = ("model.layers.", LLAMA_NAMES, "model.embed_tokens", "model.norm", "lm_head")


def reads_directory(family: str) -> bool:
    """Whether directories of this model type are read; of the others the files that are made of them."""
    return family in LAYOUTS or family in LAYOUTS_OF_LLAMA


def hf_tensors(directory: Path) -> dict[str, Array]:
    """All tensors of a directory's safetensors files; bfloat16 through its bits."""
    out: dict[str, Array] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            out.update(load_file(file))
        except (TypeError, KeyError, AttributeError):  # numpy has no bfloat16
            out.update(_load_bf16(file))
    return {name: np.asarray(t, np.float64) for name, t in out.items()}


def _load_bf16(file: Path) -> dict[str, Array]:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    out = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        assert info["dtype"] == "BF16", (name, info["dtype"])
        bits = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
        out[name] = bits.view(np.float32).reshape(info["shape"])
    return out


def load_hf(directory: Path, n_ctx: int) -> Weights:
    config = json.loads((directory / "config.json").read_text())
    tensors = hf_tensors(directory)
    kind = config["model_type"]
    gpt2 = kind == "gpt2"
    stem, names, embedding, norm, head = LAYOUTS.get(kind, LLAMA_LAYOUT)
    n_layers = config["n_layer" if gpt2 else "num_hidden_layers"]
    d_model = config["n_embd" if gpt2 else "hidden_size"]
    n_heads = config["n_head" if gpt2 else "num_attention_heads"]
    n_kv_heads = config.get("num_key_value_heads") or n_heads
    head_dim = config.get("head_dim") or d_model // n_heads
    layers = []
    for i in range(n_layers):
        part = {
            f"{ours}.{kind}": tensors[f"{stem}{i}.{theirs}.{kind}"]
            for theirs, ours in names.items()
            for kind in ("weight", "bias")
            if f"{stem}{i}.{theirs}.{kind}" in tensors
        }
        if gpt2:  # Conv1D keeps [in, out]
            part = {name: t.T if t.ndim == 2 else t for name, t in part.items()}
        if kind == "gpt_neox":  # each head has its rows of q, k and v together
            for name in ("attn_qkv.weight", "attn_qkv.bias"):
                heads = np.split(part[name], n_heads)
                part[name] = np.concatenate([np.split(rows, 3)[which] for which in range(3) for rows in heads])
        layers.append(_layer(part, n_heads * head_dim, n_kv_heads * head_dim))
        layers[-1].experts = experts_of_hf(tensors, f"{stem}{i}.", config)
        layers[-1].rope = None if gpt2 else _rope_of_hf(config, head_dim, n_ctx)
        layers[-1].window = (config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    embed = tensors[f"{embedding}.weight"]
    eps = {"gpt2": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps", "phi": "layer_norm_eps"}.get(kind)
    activation = config["activation_function"] if gpt2 else config["hidden_act"]
    gelu = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu_erf"}
    return Weights(
        n_heads,
        n_kv_heads,
        eps=config[eps or "rms_norm_eps"],
        activation=gelu.get(activation, activation),
        embed=embed,
        layers=layers,
        norm=tensors[f"{norm}.weight"],
        norm_b=tensors.get(f"{norm}.bias"),
        head=tensors.get(f"{head}.weight", embed),
        head_b=tensors.get(f"{head}.bias"),
        parallel=config.get("use_parallel_residual", kind == "phi"),
        positions=tensors["transformer.wpe.weight"] if gpt2 else None,
    )


def _rope_of_hf(config: dict[str, Any], head_dim: int, n_ctx: int) -> Rope:
    """Both spellings: rope_parameters (transformers 5) and rope_scaling beside rope_theta (before)."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    base = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base", 10000.0)
    n_rot = int(head_dim * (rope.get("partial_rotary_factor") or config.get("rotary_pct", 1.0)))
    inv_freq = base ** (-np.arange(0, n_rot, 2) / n_rot)
    kind = rope.get("rope_type", rope.get("type", "default"))
    max_ctx = config["max_position_embeddings"]
    factor, scale = rope.get("factor", 1.0), 1.0
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", max_ctx)
    if kind == "linear":
        inv_freq = inv_freq / factor
    elif kind == "llama3":
        turns = original * inv_freq / (2 * np.pi)  # full turns within the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        inv_freq = inv_freq / factor * (1 - kept) + inv_freq * kept
    elif kind == "yarn":
        inv_freq = yarn(inv_freq, factor, original, base, rope.get("beta_fast", 32), rope.get("beta_slow", 1))
        scale = rope.get("attention_factor") or 0.1 * log(factor) + 1
    elif kind == "longrope":
        which = "long" if (n_ctx or max_ctx) > original else "short"
        inv_freq = inv_freq / np.array(rope[f"{which}_factor"])
        scale = rope.get("attention_factor") or sqrt(1 + log(max_ctx / original) / log(original))
    elif kind != "default":
        raise ValueError(kind)
    return Rope(inv_freq, interleaved=False, scale=scale)
