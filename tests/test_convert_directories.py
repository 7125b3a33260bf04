# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories: what is read of each family, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import slimrt
from conftest import GOLDEN, values_of
from reference_files import hf_tensors
from slimrt.converter import convert as tool
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import read_gguf
from slimrt.modelfile.hf.directory import read_hf
from slimrt.modelfile.hf.layout import as_ternary, interleave_pairs, parts_in_order
from slimrt.modelfile.hf.rope import rope_fields

ALL = sorted(path.name for path in GOLDEN.iterdir())


# ---------------------------------------------------------------- what is read
def of_experts(model: str, name: str, tensor: np.ndarray) -> list[np.ndarray]:
    """Each expert's matrix where they are stored together; Granite's and gpt-oss's gate and up apart."""
    if name.endswith(".scale"):  # a number for each
        return [tensor]
    if "input_linear" in name:
        return [half for expert in tensor for half in np.split(expert, 2)]
    if ".experts.gate_up_proj" in name and model.startswith("gpt_oss"):
        return [expert[..., first::2] for expert in tensor for first in (0, 1)]
    together = ("_exps", "output_linear", ".experts.down_proj", ".experts.gate_up_proj")
    return list(tensor) if any(word in name for word in together) else [tensor]


@pytest.mark.parametrize("name", [name for name in ALL if name != "bitnet_online"])  # whose weights become ternary
def test_every_weight_arrives_unchanged(name, convert):
    """By content: each tensor of the directory is in the file once, whatever it is called and however it is turned."""
    less_one = name.startswith("gemma") and not name.startswith("gemma4")  # norms, to which GGUF adds it
    unused = 2 if name == "opt" else 0  # positions
    tensors = {key: t + (less_one and "norm" in key) for key, t in hf_tensors(GOLDEN / name).items()}
    tensors = {key: t[unused * ("positions" in key) :] for key, t in tensors.items()}
    theirs = sorted(
        np.sort(part.astype(np.float32), axis=None).tobytes()
        for key, t in tensors.items()
        for part in of_experts(name, key, t)
    )
    ours = values_of(convert(GOLDEN / name))
    made = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    ours = {key: t for key, t in ours.items() if key not in made}
    for key in [key for key in ours if "attn_k_b" in key]:  # of latent attention, where K's and V's part are one matrix
        both = ours.pop(key), ours.pop(key.replace("attn_k_b", "attn_v_b"))
        ours[key.replace("attn_k_b", "attn_kv_b")] = np.concatenate([part.ravel() for part in both])
    written = [
        np.sort(part.astype(np.float32), axis=None).tobytes()
        for key, t in ours.items()
        for part in of_experts(name, key, t)
    ]
    assert sorted(written) == theirs


def test_llama_rows_are_permuted_and_the_others_not(convert):
    for name, permuted in {"llama_bias": True, "mistral_window": True, "qwen2_mha": False}.items():
        config = json.loads((GOLDEN / name / "config.json").read_text())
        theirs, ours = hf_tensors(GOLDEN / name), values_of(convert(GOLDEN / name))
        n_heads = config["num_attention_heads"]
        for part in ("weight", "bias"):
            if f"blk.1.attn_q.{part}" not in ours:
                continue
            wanted = theirs[f"model.layers.1.self_attn.q_proj.{part}"]
            if permuted:  # as llama.cpp's converter does it
                wanted = (
                    wanted.reshape(n_heads, 2, len(wanted) // n_heads // 2, *wanted.shape[1:])
                    .swapaxes(1, 2)
                    .reshape(wanted.shape)
                )
            assert np.array_equal(ours[f"blk.1.attn_q.{part}"], wanted), (name, part)
        assert np.array_equal(ours["blk.1.attn_v.weight"], theirs["model.layers.1.self_attn.v_proj.weight"])


def test_interleaved_pairs_are_neighbours():
    rows = np.arange(12)  # two heads of six: dimension i goes with i + 3
    assert interleave_pairs(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_rows_of_heads_are_put_in_order():
    rows = np.arange(12)  # two heads with two rows each of q, k and v
    assert parts_in_order(rows, 2).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


METADATA = {
    "llama_mha": {"llama.rope.freq_base": 500.0, "llama.attention.head_count_kv": 4, "llama.vocab_size": 101},
    "llama_gqa_tied": {"llama.attention.head_count_kv": 2, "llama.context_length": 128},
    "llama_head_dim": {"llama.attention.key_length": 20, "llama.attention.value_length": 20},
    "llama_linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "general.file_type": 1},
    "llama_yarn": {"llama.rope.scaling.type": "yarn", "llama.rope.freq_base": 1000.0},
    "mistral_window": {"general.architecture": "llama", "llama.attention.sliding_window": 13},
    "qwen2_tied": {"general.architecture": "qwen2", "qwen2.attention.sliding_window": None, "general.file_type": 32},
    "phi3": {"phi3.rope.scaling.type": "longrope", "phi3.rope.scaling.original_context_length": 48},
    "gpt2_erf": {"slimrt.activation": "gelu_erf", "gpt2.feed_forward_length": 80, "gpt2.rope.freq_base": None},
    "gpt2_tanh": {"slimrt.activation": "gelu_tanh", "gpt2.feed_forward_length": 192},
    "phi3_partial": {"phi3.rope.dimension_count": 12, "phi3.attention.head_count_kv": 1},
    "gptneox": {
        "general.architecture": "gptneox",
        "slimrt.activation": "gelu_erf",
        "gptneox.use_parallel_residual": True,
        "gptneox.rope.dimension_count": 6,
        "gptneox.attention.layer_norm_epsilon": 1e-5,
    },
    "gptneox_sequential": {
        "slimrt.activation": "gelu_tanh",
        "gptneox.use_parallel_residual": False,
        "gptneox.rope.dimension_count": 4,
        "gptneox.rope.freq_base": 500.0,
    },
    "phi2": {"general.architecture": "phi2", "slimrt.activation": "gelu_tanh", "phi2.rope.dimension_count": 8},
    "qwen3": {"qwen3.attention.key_length": 12, "qwen3.attention.sliding_window": None, "slimrt.activation": None},
    "stablelm": {
        "stablelm.rope.dimension_count": 4,
        "stablelm.attention.layer_norm_epsilon": 1e-5,
        "stablelm.use_parallel_residual": None,
    },
    "gemma2": {
        "gemma2.attention.sliding_window": 9,
        "gemma2.attention.sliding_window_pattern": None,
        "gemma2.attn_logit_softcapping": 3.0,
        "gemma2.final_logit_softcapping": 6.0,
        "gemma2.attention.scale": None,
    },
    "gemma2_mha": {
        "gemma2.attention.sliding_window_pattern": [False, True, True],
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
        "gemma2.attention.scale": 7**-0.5,
    },
    "gemma": {"gemma.attention.key_length": 20, "gemma.attention.value_length": 20, "slimrt.activation": None},
    "olmo": {"olmo.attention.layer_norm_epsilon": 1e-5, "olmo.attention.clamp_kqv": None},
    "olmo_clipped": {"olmo.attention.clamp_kqv": 0.9, "olmo.attention.head_count_kv": 2},
    "cohere": {"general.architecture": "command-r", "command-r.logit_scale": 0.25},
    "bloom": {
        "bloom.attention.layer_norm_epsilon": 2e-5,
        "bloom.feed_forward_length": 192,
        "bloom.context_length": 128,
        "bloom.rope.freq_base": None,
    },
    "granite": {
        "granite.attention.scale": 0.15,
        "granite.embedding_scale": 5.0,
        "granite.residual_scale": 0.4,
        "granite.logit_scale": 3.0,
    },
    "minicpm": {
        "general.architecture": "minicpm",
        "minicpm.attention.scale": None,
        "minicpm.embedding_scale": 12.0,
        "minicpm.residual_scale": 1.4 / 2**0.5,
        "minicpm.logit_scale": 3.0,
    },
    "gemma3": {
        "gemma3.attention.sliding_window": 9,
        "gemma3.attention.sliding_window_pattern": None,
        "gemma3.attention.scale": None,
        "gemma3.rope.freq_base_swa": 500.0,
        "gemma3.rope.freq_base": 3000.0,
        "gemma3.rope.scaling.factor": 8.0,
    },
    "gemma3_mha": {
        "gemma3.attention.sliding_window_pattern": [True, True, False],
        "gemma3.attention.scale": 7**-0.5,
        "gemma3.rope.freq_base_swa": 700.0,
    },
    "gemma4": {
        "gemma4.attention.head_count_kv": [2, 1, 2, 1, 1],
        "gemma4.attention.key_length": 32,
        "gemma4.attention.key_length_swa": 20,
        "gemma4.attention.value_length_swa": 20,
        "gemma4.attention.sliding_window_pattern": [True, False, True, False, False],
        "gemma4.attention.shared_kv_layers": 0,
        "gemma4.embedding_length_per_layer_input": 0,
        "gemma4.final_logit_softcapping": 20.0,
        "gemma4.rope.dimension_count": 32,
        "gemma4.rope.dimension_count_swa": 20,
        "gemma4.rope.freq_base": 1e6,
        "gemma4.rope.freq_base_swa": 1e4,
    },
    "gemma4_mha": {
        "gemma4.attention.head_count_kv": 4,
        "gemma4.attention.sliding_window_pattern": [True, True, False],
        "gemma4.final_logit_softcapping": None,
    },
    "gemma4_small": {
        "gemma4.attention.shared_kv_layers": 3,
        "gemma4.embedding_length_per_layer_input": 12,
        "gemma4.feed_forward_length": [88, 88, 88, 176, 176, 176],
        "slimrt.cache.owners": [0, 1, 2, 1, 1, 2],
        "slimrt.cache.shared_keys": "rotated",
    },
    "gemma4_experts": {
        "gemma4.expert_count": 6,
        "gemma4.expert_used_count": 2,
        "gemma4.expert_feed_forward_length": 28,
    },
    "mistral4": {
        "mistral4.attention.temperature_scale": 0.3,
        "mistral4.attention.temperature_length": 16,
        "mistral4.rope.dimension_count": 8,
        "mistral4.expert_weights_norm": True,
    },
    "olmo3": {"general.architecture": "olmo2", "olmo2.attention.sliding_window": 12},
    "cohere2": {"cohere2.attention.sliding_window": 10, "cohere2.logit_scale": 0.25},
    "exaone4_full": {"exaone4.attention.sliding_window": None},
    "ministral3": {
        "general.architecture": "mistral3",
        "mistral3.attention.temperature_scale": 0.3,
        "mistral3.rope.scaling.original_context_length": 16,
    },
    "smollm3": {"smollm3.attention.sliding_window": None, "smollm3.attention.head_count_kv": 2},
    "glm4": {"glm4.rope.dimension_count": 6, "glm4.attention.head_count_kv": 2},
    "opt": {"opt.context_length": 128, "opt.attention.layer_norm_epsilon": 1e-5, "opt.feed_forward_length": 88},
    "bitnet": {"slimrt.activation": "relu_squared", "bitnet.attention.head_count_kv": 2},
    "bitnet_online": {"slimrt.activation": "silu"},
    "olmoe": {"olmoe.expert_count": 7, "olmoe.expert_used_count": 3, "olmoe.expert_weights_norm": False},
    "deepseek": {"deepseek.leading_dense_block_count": 1, "deepseek.expert_shared_count": 2},
    "mixtral": {"general.architecture": "llama", "llama.expert_count": 5, "llama.expert_weights_norm": None},
    "phimoe": {"phimoe.expert_count": 6, "phimoe.rope.scaling.attn_factor": float(np.float32(1.24))},
    "qwen2moe": {"qwen2moe.expert_feed_forward_length": 24, "qwen2moe.expert_shared_feed_forward_length": 56},
    "qwen3moe": {"qwen3moe.expert_used_count": 3, "qwen3moe.expert_weights_norm": True},
    "granitemoe": {"granitemoe.expert_feed_forward_length": 40, "granitemoe.residual_scale": 0.4},
    "minimax_m2": {"minimax-m2.expert_gating_func": 2, "minimax-m2.rope.dimension_count": 6},
    "gpt_oss": {"gpt-oss.attention.sliding_window": 13, "gpt-oss.expert_feed_forward_length": 40},
    "openlm": {"openlm.feed_forward_length": 256, "openlm.attention.layer_norm_epsilon": 1e-5},
    "mpt": {"mpt.attention.max_alibi_bias": 8.0, "mpt.attention.clamp_kqv": None, "slimrt.activation": "gelu_erf"},
    "mpt_clipped": {"mpt.attention.clamp_kqv": 1.0, "mpt.attention.head_count": 4},
    "olmo2": {"olmo2.attention.layer_norm_rms_epsilon": 1e-6, "slimrt.activation": None},
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(name, convert):
    model = read_gguf(convert(GOLDEN / name))
    found = {key: model.value(key) for key in METADATA[name]}
    assert found == {key: pytest.approx(v) if isinstance(v, float) else v for key, v in METADATA[name].items()}
    assert model.value("tokenizer.ggml.model") == "no_vocab"


def test_types_are_the_source_s_own(convert):
    for name, kind in {"llama_linear": "F16", "qwen2_tied": "BF16", "llama_mha": "F32"}.items():
        tensors = read_gguf(convert(GOLDEN / name)).tensors
        assert {t.type.name for t in tensors.values() if len(t.shape) == 2} == {kind}
        assert {t.type.name for t in tensors.values() if len(t.shape) == 1} == {"F32"}


def test_llama3_divisors_match_transformers_formula():
    config = json.loads((GOLDEN / "llama_llama3" / "config.json").read_text())
    _, (divisors,) = rope_fields(config, 12, {})
    p = config["rope_scaling"]
    for i, divisor in enumerate(divisors.values()):
        wavelength = 2 * np.pi * config["rope_theta"] ** (2 * i / 12)
        original, low, high = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"]
        if wavelength < original / high:
            wanted = 1.0
        elif wavelength > original / low:
            wanted = p["factor"]
        else:
            smooth = (original / wavelength - low) / (high - low)
            wanted = 1 / ((1 - smooth) / p["factor"] + smooth)
        assert divisor == pytest.approx(wanted, rel=1e-6)


ROPE = {"max_position_embeddings": 128, "rope_theta": 1e4}


def scaling(**parameters) -> dict[str, object]:
    fields, _ = rope_fields({**ROPE, "rope_scaling": parameters}, 16, {})
    return {key.removeprefix("rope.scaling."): value.value for key, value in fields.items() if "scaling" in key}


def test_yarn_magnitude_is_what_multiplies_llama_cpp_s_own():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    usual = 1 + 0.1 * np.log(4)
    assert scaling(**yarn) == {
        "type": "yarn", "factor": 4, "original_context_length": 32, "yarn_beta_fast": 32, "yarn_beta_slow": 1
    }  # fmt: skip
    assert scaling(**yarn, attention_factor=1.0)["attn_factor"] == pytest.approx(1 / usual)
    assert scaling(**yarn, mscale=0.5, mscale_all_dim=1.0)["attn_factor"] == pytest.approx(
        (1 + 0.05 * np.log(4)) / usual**2
    )
    assert scaling(**yarn, beta_fast=16)["yarn_beta_fast"] == 16


def test_rope_scalings_that_are_refused():
    assert scaling(type="dynamic", factor=1.0) == {} == scaling(rope_type="default")
    with pytest.raises(UnsupportedError, match="dynamic.*128"):
        scaling(type="dynamic", factor=2.0)
    for off in (False, None):  # which transformers takes alike
        with pytest.raises(UnsupportedError, match="truncate"):
            scaling(type="yarn", factor=2.0, truncate=off)
    with pytest.raises(UnsupportedError, match="differ between layers"):
        scaling(full_attention={"rope_theta": 1e6}, sliding_attention={"rope_theta": 1e4})
    with pytest.raises(ModelFormatError, match="long_factor is not a list of 8"):
        scaling(rope_type="longrope", long_factor=[1.0] * 7, short_factor=[1.0] * 8)


@pytest.mark.parametrize(("share", "n_rot"), [(0.34, 5), (0.1, 1), (1.25, 20), (0.05, 0)])
def test_shares_of_a_head_that_cannot_turn(share, n_rot):
    with pytest.raises(ModelFormatError, match=f"turns {n_rot} of a head's 16"):
        rope_fields({**ROPE, "partial_rotary_factor": share}, 16, {})


# ---------------------------------------------------------------- what is refused, what is understood
def changed_config(tmp_path: Path, name: str, **changes) -> Path:
    directory = Path(shutil.copytree(GOLDEN / name, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_what_the_runtime_refuses_is_not_left_on_the_disk(tmp_path, monkeypatch):
    """Neither where it was to be, in place of what was there, nor in the cache; the message names the source."""
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "cache"))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    source, out = changed_config(tmp_path, "llama_mha", rope_parameters=rope), tmp_path / "out.gguf"
    out.write_text("something else")
    for make in (lambda: slimrt.convert(source, out), lambda: slimrt.Model(source)):
        with pytest.raises(UnsupportedError, match=f"^{source}: partial rotary embedding"):
            make()
    assert out.read_text() == "something else"
    assert [*tmp_path.glob("**/*.gguf*")] == [out]


def test_rope_in_the_spelling_of_gpt_neox_alone(tmp_path):
    """As transformers reads it: a rope_theta without rotary_emb_base is of no effect."""
    source = changed_config(tmp_path, "gptneox", rope_parameters=None, rope_theta=500.0, rotary_pct=0.5)
    assert read_hf(source)[0].value("gptneox.rope.freq_base", 0.0) == 10000


REFUSED = {
    "dynamic scaling": ("llama_mha", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "scaled by layer": ("gpt2_erf", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "unscaled scores": ("gpt2_erf", {"scale_attn_weights": False}, "scale_attn_weights"),
    "other activation": ("gpt2_erf", {"activation_function": "relu"}, "relu"),
    "window of some layers": (
        "qwen2_mha",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
        "1 of 2 layers",
    ),
    "window of all layers": (
        "qwen2_mha",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
        "use_sliding_window",
    ),
    "both directions": ("llama_mha", {"is_causal": False}, "is_causal = false"),
    "windows of Qwen2-MoE": (
        "qwen2moe",
        {"use_sliding_window": True, "sliding_window": 8},
        "use_sliding_window = True",
    ),
    "no window beside which positions are known": (
        "cohere2",
        {"layer_types": None, "sliding_window_pattern": 1, "sliding_window": 8},
        "no layer has the window",
    ),
    "windows that are switched off": (
        "qwen2_mha",
        {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has windows",
    ),
    "erf's GELU in Gemma 3": ("gemma3_mha", {"hidden_activation": "gelu"}, "hidden_act = 'gelu'"),
    "an epsilon that OLMo has not": ("olmo_clipped", {"layer_norm_eps": 0.05}, "layer_norm_eps = 0.05"),
    "YaRN the wrong way round": (
        "llama_mha",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 1.0,
                "beta_slow": 99.0,
            }
        },
        "leave no pairs between",
    ),
    "Phi's QK-norm": ("phi2", {"qk_layernorm": True}, "qk_layernorm"),
    "another activation of Phi": ("phi2", {"hidden_act": "silu"}, "hidden_act"),
    "GPT-NeoX without biases": ("gptneox", {"attention_bias": False}, "attention_bias"),
    "OLMo-2 with biases": ("olmo2", {"attention_bias": True}, "attention_bias"),
    "Qwen3 with biases": ("qwen3", {"attention_bias": True}, "attention_bias"),
    "StableLM 2 12B": ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
    "LayerNorms of heads": ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    "Command R+": ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    "another activation of Gemma 2": ("gemma2", {"hidden_activation": "gelu"}, "hidden_act"),
    "Gemma 2 without a cap": ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping = None"),
    "Gemma 2 without windows": ("gemma2", {"sliding_window": None}, "sliding_window = None"),
    "Gemma 2 in both directions": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "Ministral 3 whose q do not grow": (
        "ministral3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0}},
        "no llama_4_scaling_beta",
    ),
    "Phi-3.5-MoE with another jitter": ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    "longrope of two magnitudes": (
        "phimoe",
        {"rope_scaling": {"type": "longrope", "short_mscale": 1.0, "long_mscale": 1.2}},
        "short_mscale and long_mscale",
    ),
    "positions of Gemma 3 that are of no layers": (
        "gemma3",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0}},
        "which layers have this factor",
    ),
    "positions of OLMo-3 that are of no layers": (
        "olmo3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}},
        "which layers have this rope_theta",
    ),
    "positions of layers that Gemma 3 has not": (
        "gemma3",
        {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}},
        "rope_parameters of chunked_attention",
    ),
    "gpt-oss that may be without YaRN": (
        "gpt_oss_plain",
        {"rope_parameters": None, "rope_scaling": None},
        "empty rope_scaling",
    ),
    "groups of Mistral 4": ("mistral4", {"n_group": 2}, "n_group"),
    "a share of Mistral 4's heads that rotates": (
        "mistral4",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "a part of what rotates of a head with a latent": (
        "deepseek2",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor other than 1",
    ),
    "another activation of Gemma": ("gemma", {"hidden_act": "silu"}, "hidden_act"),
    "BLOOM's other residual": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    "MPT without ALiBi": ("mpt", {"attn_config": {"alibi": False}}, "alibi = False"),
    "MPT's QK-norm": ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
    "MPT with grouped heads": ("mpt", {"attn_config": {"kv_n_heads": 2}}, "kv_n_heads"),
    "MPT with biases": ("mpt", {"no_bias": False}, "no_bias"),
    "OPT 350M": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    "OPT 350M's width": ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim and hidden_size"),
    "OPT with another activation": ("opt", {"activation_function": "gelu"}, "activation_function"),
    "Granite with another activation": ("granite", {"hidden_act": "gelu"}, "hidden_act"),
    "MiniCPM with sparse attention": ("minicpm", {"sparse_config": {"topk": 64}}, "sparse_config"),
    "experts in every other layer": ("qwen2moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "a layer without experts": ("qwen3moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "OLMoE that clips": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    "MiniCPM with experts": ("minicpm", {"num_experts": 8}, "num_experts"),
    "packed ternary weights": (
        "bitnet_online",
        {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "offline"}},
        "weights quantised by 'bitnet'",
    ),
    "BitNet of more bits": (
        "bitnet_online",
        {"architectures": ["BitnetForCausalLM"], "weight_bits": 2, "quantization_config": None, "hidden_act": "silu"},
        "weight_bits",
    ),
    "OpenLM with another FFN": ("openlm", {"params_args_dict": {"ffn_type": "gelu"}}, "ffn_type = 'gelu'"),
    "OpenLM without QK-norm": (
        "openlm",
        {
            "params_args_dict": {
                "ffn_type": "swiglu",
                "positional_embedding_type": "rotary",
                "model_norm": "gain_only_lp_layer_norm",
            }
        },
        "without qk_norm",
    ),
    "quantised": ("llama_mha", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    "quantised by MLX": (
        "llama_mha",
        {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
        "weights quantised by 'mlx'; convert the unquantised model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_changes_the_mathematics_is_refused_by_name(case, tmp_path):
    name, changes, match = REFUSED[case]
    with pytest.raises(UnsupportedError, match=match):
        tool.convert(changed_config(tmp_path, name, **changes), tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("name", "left_out", "wanted"),
    [
        ("mixtral", ("rope_parameters", "rope_theta", "rms_norm_eps"),
         {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5}),
        ("bitnet", ("rope_parameters", "rope_theta"), {"rope.freq_base": 5e5}),
        ("ministral3", ("rms_norm_eps",), {"attention.layer_norm_rms_epsilon": 1e-5}),
        ("gpt_oss_plain", ("rope_parameters", "rope_scaling"),
         {"rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}),
    ],
)  # fmt: skip
def test_what_a_config_leaves_out_is_as_transformers_has_it(name, left_out, wanted, tmp_path):
    directory = changed_config(tmp_path, name)
    config = json.loads((directory / "config.json").read_text())
    for key in left_out:
        config.pop(key, None)
    (directory / "config.json").write_text(json.dumps(config))
    model, _ = read_hf(directory)
    architecture = model.value("general.architecture")
    for key, value in wanted.items():
        assert model.value(f"{architecture}.{key}") == pytest.approx(value)


def test_bases_that_gemma_3_leaves_out(tmp_path):
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    model, _ = read_hf(changed_config(tmp_path, "gemma3", rope_parameters=kinds))
    assert model.value("gemma3.rope.freq_base") == 1e6 and model.value("gemma3.rope.freq_base_swa") == 1e4
    assert model.value("gemma3.rope.scaling.factor") == 8


def test_a_scaling_beside_the_parameters_of_gemma_3_s_layers(tmp_path):
    """It is that of the layers without a window, as transformers has it, and the others keep their base."""
    kinds = {"full_attention": {"rope_theta": 3000.0}, "sliding_attention": {"rope_theta": 500.0}}
    scaling = {"rope_type": "linear", "factor": 4.0}
    model, _ = read_hf(changed_config(tmp_path, "gemma3", rope_parameters=kinds, rope_scaling=scaling))
    wanted = {"freq_base": 3000, "freq_base_swa": 500, "scaling.factor": 4}
    assert {key: model.value(f"gemma3.rope.{key}") for key in wanted} == wanted


def test_gpt_oss_s_parameters_that_are_null_are_yarn(tmp_path):
    model, _ = read_hf(changed_config(tmp_path, "gpt_oss_plain", rope_parameters=None))
    assert model.value("gpt-oss.rope.scaling.factor") == 32


def test_scales_of_0_are_not_left_out(tmp_path):
    """They were, as if they were 1."""
    with pytest.raises(ModelFormatError, match="residual_scale is 0, not a positive"):
        slimrt.Model(changed_config(tmp_path, "granite", residual_multiplier=0.0))


def test_a_window_wider_than_the_trained_context_is_one(tmp_path):
    model, _ = read_hf(changed_config(tmp_path, "mistral_window", max_position_embeddings=8, sliding_window=16))
    assert model.value("llama.attention.sliding_window") == 16


def test_q_grow_past_the_original_context_whatever_scales_rope(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    model, _ = read_hf(changed_config(tmp_path, "ministral3", rope_parameters=rope))
    assert model.value("mistral3.attention.temperature_length") == 16


def test_first_configurations(tmp_path):
    """StableLM 3B's and BLOOM's smaller models' keys."""
    for name, changes in {
        "stablelm": {"model_type": "stablelm_epoch", "rope_pct": 0.25, "norm_eps": 1e-5, "rope_theta": 10000,
                     "rope_parameters": None, "layer_norm_eps": None},
        "bloom": {"n_embed": 48, "hidden_size": None},
    }.items():  # fmt: skip
        wanted, _ = read_hf(GOLDEN / name)
        model, _ = read_hf(changed_config(tmp_path / name, name, **changes))
        assert {key: value for key, value in model.metadata.items() if key != "general.name"} == {
            key: value for key, value in wanted.metadata.items() if key != "general.name"
        }
        assert all(np.array_equal(model.tensor(key).values(), wanted.tensor(key).values()) for key in wanted.tensors)


def test_ternary_weights(tmp_path):
    """Of each matrix of the layers -s, 0 and s, s its mean size; of both names that BitNet's norms have."""
    theirs = hf_tensors(GOLDEN / "bitnet_online")
    model, _ = read_hf(GOLDEN / "bitnet_online")
    for ours, name in {"attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}.items():
        wanted = theirs[f"model.layers.1.{name}.weight"]
        got, size = model.tensor(f"blk.1.{ours}.weight").values(), np.abs(wanted).mean()
        assert np.array_equal(np.unique(np.abs(got)), [0, np.float32(size)])
        clear = np.abs(np.abs(wanted) / size - 0.5) > 1e-6
        assert np.array_equal(np.sign(got)[clear], np.where(np.abs(wanted) > size / 2, np.sign(wanted), 0)[clear])
    own = {"model_type": "llama", "architectures": ["BitnetForCausalLM"], "weight_bits": 1, "quantization_config": None}
    directory = changed_config(tmp_path, "bitnet_online", **own)
    names = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
    tensors = {key: t.astype(np.float32) for key, t in theirs.items()}
    for new, old in names.items():
        tensors = {key.replace(new, old): t for key, t in tensors.items()}
    save_tensors(directory, tensors)
    other, _ = read_hf(directory)
    assert other.tensors.keys() == model.tensors.keys()
    assert all(np.array_equal(other.tensor(key).values(), model.tensor(key).values()) for key in model.tensors)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_ternary_weights_keep_their_type(dtype):
    values = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    if dtype == "F16":
        made = as_ternary(values.astype(np.float16), dtype).astype(np.float32)
    else:
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        made = (as_ternary((values.view(np.uint32) >> 16).astype(np.uint16), dtype).astype(np.uint32) << 16).view(
            np.float32
        )
    size = np.abs(values).mean()
    assert set(np.unique(np.sign(made))) == {-1, 0, 1} and len(np.unique(np.abs(made))) == 2
    assert np.abs(made).max() == pytest.approx(size, rel=2**-11 if dtype == "F16" else 2**-8)


def test_windows_that_have_no_effect(tmp_path):
    unused = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None}
    model, _ = read_hf(changed_config(tmp_path, "qwen2_mha", **unused))
    assert "qwen2.attention.sliding_window" not in model.metadata
    shutil.rmtree(tmp_path / "model")
    model, _ = read_hf(changed_config(tmp_path, "mistral_window", sliding_window=None))
    assert "llama.attention.sliding_window" not in model.metadata


def save_tensors(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(
        {name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()}, directory / "model.safetensors"
    )


def test_a_bare_model_and_computed_buffers_are_read(tmp_path):
    """OpenAI's own GPT-2 files leave "transformer." out and hold the causal mask."""
    directory = Path(shutil.copytree(GOLDEN / "gpt2_tanh", tmp_path / "model"))
    tensors = {name.removeprefix("transformer."): t for name, t in hf_tensors(directory).items()}
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 128, 128)), "h.0.attn.masked_bias": np.array([-1e4])}
    save_tensors(directory, tensors)
    wanted, _ = read_hf(GOLDEN / "gpt2_tanh")
    got, _ = read_hf(directory)
    assert all(np.array_equal(got.tensor(n).values(), t.values()) for n, t in wanted.tensors.items())


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64])
def test_computed_buffers_may_be_of_types_that_no_weight_has(dtype, tmp_path):
    """Pythia's files, and GPT-2's that were saved again, hold masks of booleans or bytes."""
    for name, stem in (("gptneox", "gpt_neox.layers.0.attention"), ("gpt2_tanh", "transformer.h.0.attn")):
        directory = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
        tensors = {key: tensor.astype(np.float32) for key, tensor in hf_tensors(directory).items()}
        mask = {f"{stem}.bias": np.tril(np.ones((1, 1, 128, 128))).astype(dtype)}
        save_file(tensors | mask, directory / "model.safetensors")
        wanted, got = read_hf(GOLDEN / name)[0], read_hf(directory)[0]
        assert wanted.tensors.keys() == got.tensors.keys()
        assert all(np.array_equal(got.tensor(n).values(), t.values()) for n, t in wanted.tensors.items())


def test_a_tied_head_may_be_stored_but_not_differ(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "gpt2_tanh", tmp_path / "model"))
    tensors = hf_tensors(directory)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    save_tensors(directory, tensors)
    assert "output.weight" not in read_hf(directory)[0].tensors
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_tensors(directory, tensors)
    with pytest.raises(ModelFormatError, match="tie_word_embeddings.*lm_head.weight differs"):
        read_hf(directory)


@pytest.mark.parametrize("name, embed", [("llama_gqa_tied", "model.embed_tokens"), ("gpt2_tanh", "transformer.wte")])
def test_a_tied_head_may_be_stored_in_place_of_the_embedding(name, embed, tmp_path):
    """As safetensors' save_model() leaves it; transformers reads it."""
    directory = Path(shutil.copytree(GOLDEN / name, tmp_path / "model"))
    tensors = hf_tensors(directory)
    for file in directory.glob("model*"):
        file.unlink()
    tensors["lm_head.weight"] = tensors.pop(f"{embed}.weight")
    save_tensors(directory, tensors)
    wanted, got = read_hf(GOLDEN / name)[0], read_hf(directory)[0]
    assert wanted.tensors.keys() == got.tensors.keys()
    assert all(np.array_equal(got.tensor(n).values(), t.values()) for n, t in wanted.tensors.items())
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=f"'{embed}.weight' is missing"):
        read_hf(directory)


def test_an_integer_tensor_is_refused_by_name(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "llama_mha", tmp_path / "model"))
    raw = bytearray((directory / "model.safetensors").read_bytes())
    at = raw.index(b'"F32"')
    raw[at : at + 5] = b'"I32"'
    (directory / "model.safetensors").write_bytes(raw)
    with pytest.raises(UnsupportedError, match="is I32; slimrt converts F64, F32, F16, BF16"):
        read_hf(directory)
