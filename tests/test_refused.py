# SPDX-License-Identifier: Apache-2.0
"""What an architecture must have and must not have, and architectures that are refused, by name and with the reason."""

from __future__ import annotations

import json

import numpy as np
import pytest

import slimrt
from gguf_shapes import Shape, write_random
from slimrt import _core
from test_bad_input import half, ones, outcomes

# Architecture, change of metadata or tensors, error, what it must name.
FAMILIES = {
    "odd rotation": ("gptneox", {"rope.dimension_count": 3}, {}, slimrt.ModelFormatError, "dimension_count is odd"),
    "no rotation": ("gptneox", {"rope.dimension_count": 0}, {}, slimrt.ModelFormatError, "dimension_count"),
    "rotation wider than a head": (
        "phi2",
        {"rope.dimension_count": 10},
        {},
        slimrt.ModelFormatError,
        "dimension_count",
    ),
    "residual neither": ("gptneox", {"use_parallel_residual": 1}, {}, slimrt.ModelFormatError, "use_parallel_residual"),
    "a window": ("qwen3", {"attention.sliding_window": 16}, {}, slimrt.UnsupportedError, "sliding window"),
    "no norm after": ("olmo2", {}, {"blk.1.post_ffw_norm.weight": None}, slimrt.ModelFormatError, "1.post_ffw_norm"),
    "a norm before": ("olmo2", {}, {"blk.0.attn_norm.weight": ones(32)}, slimrt.UnsupportedError, "0.attn_norm"),
    "no QK-norm": ("olmo2", {}, {"blk.0.attn_k_norm.weight": None}, slimrt.ModelFormatError, "attn_k_norm"),
    "QK-norm of a head": ("olmo2", {}, {"blk.0.attn_q_norm.weight": ones(8)}, slimrt.ModelFormatError, "attn_q_norm"),
    "QK-norm of rows": ("qwen3", {}, {"blk.0.attn_q_norm.weight": ones(32)}, slimrt.ModelFormatError, "attn_q_norm"),
    "QK-norm of Llama": ("llama", {}, {"blk.0.attn_q_norm.weight": ones(32)}, slimrt.UnsupportedError, "attn_q_norm"),
    "no experts": ("olmoe", {}, {"blk.1.ffn_up_exps.weight": None}, slimrt.ModelFormatError, "1.ffn_up_exps"),
    "no router": ("olmoe", {}, {"blk.1.ffn_gate_inp.weight": None}, slimrt.ModelFormatError, "1.ffn_up.weight"),
    "an expert too few": (
        "olmoe",
        {},
        {"blk.0.ffn_down_exps.weight": half(64, 48).reshape(2, 32, 48)},
        slimrt.ModelFormatError,
        "0.ffn_down_exps",
    ),
    "more experts taken than there are": (
        "olmoe",
        {"expert_used_count": 4},
        {},
        slimrt.ModelFormatError,
        "expert_used_count",
    ),
    "too many experts": ("olmoe", {"expert_count": 1025}, {}, slimrt.ModelFormatError, "expert_count"),
    "experts chosen by what nobody knows": (
        "olmoe",
        {"expert_gating_func": 4},
        {},
        slimrt.UnsupportedError,
        "expert_gating_func 4",
    ),
    "a bias of scores that are no probabilities": (
        "olmoe",
        {"expert_gating_func": 3},
        {"blk.1.exp_probs_b.bias": ones(3)},
        slimrt.UnsupportedError,
        "blk.1.exp_probs_b.bias' beside olmoe.expert_gating_func 3",
    ),
    "a bias for too few": (
        "olmoe",
        {},
        {"blk.0.exp_probs_b.bias": ones(2)},
        slimrt.ModelFormatError,
        "exp_probs_b.bias",
    ),
    "shares of no size": ("olmoe", {"expert_weights_scale": 0.0}, {}, slimrt.ModelFormatError, "expert_weights_scale"),
    "groups that do not divide": (
        "olmoe",
        {"expert_group_count": 2, "expert_group_used_count": 1},
        {},
        slimrt.ModelFormatError,
        "expert_group_count 2 does not divide 3",
    ),
    "too many groups": ("olmoe", {"expert_group_count": 33}, {}, slimrt.ModelFormatError, "expert_group_count"),
    "no group used": ("olmoe", {"expert_group_count": 3}, {}, slimrt.ModelFormatError, "expert_group_used_count"),
    "too few in the groups used": (
        "olmoe",
        {"expert_group_count": 3, "expert_group_used_count": 1},
        {},
        slimrt.ModelFormatError,
        "expert_used_count 2 is more than the 1",
    ),
    "groups of one sigmoid": (
        "olmoe",
        {"expert_gating_func": 2, "expert_group_count": 3, "expert_group_used_count": 2},
        {},
        slimrt.ModelFormatError,
        "groups of two or more",
    ),
    "experts of OLMo-2": ("olmo2", {"expert_count": 4}, {}, slimrt.UnsupportedError, "expert_count 4"),
    "no norm's bias": ("gptneox", {}, {"blk.1.ffn_norm.bias": None}, slimrt.ModelFormatError, "1.ffn_norm.bias"),
    "no bias": ("gptneox", {}, {"blk.1.attn_qkv.bias": None}, slimrt.ModelFormatError, "1.attn_qkv.bias"),
    "a norm too many": ("phi2", {}, {"blk.1.ffn_norm.weight": ones(32)}, slimrt.UnsupportedError, "1.ffn_norm"),
    "no head's bias": ("phi2", {}, {"output.bias": None}, slimrt.ModelFormatError, "output.bias"),
    "no embeddings of layers": (
        "gemma4",
        {"embedding_length_per_layer_input": 8},
        {},
        slimrt.ModelFormatError,
        "per_layer_token_embd",
    ),
    "no layer with K and V": ("gemma4", {"attention.shared_kv_layers": 2}, {}, slimrt.ModelFormatError, "shared_kv"),
    "no layer with a window and K and V": (
        "gemma4",
        {
            "attention.shared_kv_layers": 1,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [False, True],
        },
        {},
        slimrt.ModelFormatError,
        "no layer of its kind",
    ),
    "no experts behind a router": (
        "gemma4",
        {"expert_count": 4, "expert_used_count": 2},
        {"blk.1.ffn_gate_inp.weight": np.ones((4, 32), np.float32)},
        slimrt.ModelFormatError,
        "1.ffn_down_exps.weight' is missing",
    ),
    "no number": (
        "gemma4",
        {},
        {"blk.1.layer_output_scale.weight": np.full(1, np.nan, np.float32)},
        slimrt.ModelFormatError,
        "1.layer_output_scale.weight",
    ),
    "a layer that would not run": (
        "llama",
        {"nextn_predict_layers": 1},
        {},
        slimrt.ModelFormatError,
        "blk.1.nextn.eh_proj.weight' of such a layer is missing",
    ),
    "attention to later tokens": (
        "llama",
        {"attention.causal": False},
        {},
        slimrt.UnsupportedError,
        "llama.attention.causal is false",
    ),
    "factors of longrope beside another scaling": (
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {"rope_factors_long.weight": ones(4)},
        slimrt.UnsupportedError,
        "rope_factors_long.weight' beside llama.rope.scaling.type 'linear'",
    ),
    "factors of longrope beside a factor": (
        "llama",
        {"rope.scaling.factor": 2.0},
        {"rope_factors_long.weight": ones(4)},
        slimrt.UnsupportedError,
        "and a factor of 2 is not supported",
    ),
    "windows that turn faster": (
        "gemma2",
        {"rope.freq_base_swa": 500.0},
        {},
        slimrt.UnsupportedError,
        "a RoPE of layers with a window that differs",
    ),
    "windows of which less turns": (
        "gemma2",
        {"rope.dimension_count_swa": 4},
        {},
        slimrt.UnsupportedError,
        "a RoPE of layers with a window that differs",
    ),
    "no K": ("gemma4", {}, {"blk.1.attn_k.weight": None}, slimrt.ModelFormatError, "1.attn_k.weight"),
    "both layouts": ("phi2", {}, {"blk.0.attn_qkv.weight": half(96, 32)}, slimrt.SlimrtError, "attn_qkv.bias"),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_what_a_family_must_and_must_not_have(case, tmp_path):
    arch, changes, edit, error, name = FAMILIES[case]
    shape = Shape(32, 2, 4, 64, d_ff=48, n_vocab=50, arch=arch)
    assert outcomes([write_random(tmp_path / "good.gguf", shape)]) == {"good.gguf": "ok"}
    path = write_random(tmp_path / "model.gguf", shape, changes, edit)
    for load in (_core.Engine, _core.plan):
        with pytest.raises(error, match=name):
            load(str(path), n_ctx=8)


# Architecture in GGUF, model type of Hugging Face, what is said of them.
REFUSED = [
    ("stripedhyena", "stripedhyena", "keep no K or V"),
    ("rwkv7", "rwkv", "recurrent state"),
    ("qwen35moe", "qwen3_5_moe", "recurrent state or convolve"),
    ("deepseek32", "deepseek_v32", "indexer"),
    ("gemma3n", "gemma3n_text", "its layers differ"),
]


@pytest.mark.parametrize(("arch", "model_type", "words"), REFUSED)
def test_models_that_are_asked_for_are_refused_with_the_reason(arch, model_type, words, tmp_path):
    path = write_random(tmp_path / "model.gguf", Shape(32, 2, 4, 64, arch=arch))
    for load in (_core.Engine, _core.plan):
        with pytest.raises(
            slimrt.UnsupportedError, match=f"'{arch}' is not supported: .*{words}.*; supported are: llama"
        ):
            load(str(path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(
        slimrt.UnsupportedError, match=f"'{model_type}' is not supported: .*{words}.*; supported are: llama"
    ):
        slimrt.convert(tmp_path, tmp_path / "out.gguf", progress=False)


def test_nothing_that_runs_is_refused():
    assert not any(_core.why_refused(one["name"]) for one in _core.architectures())
    assert _core.why_refused("no such model") == ""
