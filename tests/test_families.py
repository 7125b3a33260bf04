# SPDX-License-Identifier: Apache-2.0
"""What GGUF files of families other than Llama may say or leave out, as other converters write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType

import slimrt
from conftest import GOLDEN, decode, open_engine, relative, rms
from gguf_shapes import Shape, write_random, write_sparse
from reference import Reference
from slimrt import _core
from slimrt.folding.attention import Attention
from slimrt.folding.rotation import Rotation
from slimrt.modelfile.gguf import ModelData, Tensor, array, boolean, float32, read_gguf, string, uint32, write_gguf

IDS = np.random.default_rng(3).integers(3, 60, 40)
FLOAT32 = 1e-5  # of an engine in float32 against the reference in float64, relative to the largest logit
ARCHITECTURES = ["gptneox", "phi2", "olmo2"]


def logits(path: Path) -> np.ndarray:
    """A prompt, then steps over the cache."""
    return decode(open_engine(path, "kv", "f32", n_ctx=64), IDS, 30)


def rewritten(path: Path, model: ModelData) -> Path:
    write_gguf(path, model, show_progress=False)
    return path


def without(model: ModelData, key: str) -> ModelData:
    return ModelData({name: value for name, value in model.metadata.items() if name != key}, model.tensors)


def with_fused_rows(model: ModelData) -> ModelData:
    tensors = dict(model.tensors)
    for layer in range(model.size("block_count")):
        for part in ("weight", "bias"):
            if f"blk.{layer}.attn_q.{part}" in tensors:
                rows = [tensors.pop(f"blk.{layer}.attn_{name}.{part}").values() for name in "qkv"]
                fused = Tensor.of(f"blk.{layer}.attn_qkv.{part}", np.concatenate(rows))
                tensors[fused.name] = fused
    return ModelData(model.metadata, tensors)


def test_phi2_with_fused_rows(convert, tmp_path):
    """llama.cpp reads Q, K and V of Phi-2 in one tensor or in three."""
    path = rewritten(tmp_path / "fused.gguf", with_fused_rows(read_gguf(convert(GOLDEN / "phi2"))))
    assert np.array_equal(logits(path), logits(convert(GOLDEN / "phi2")))


@pytest.mark.parametrize("name", ["llama_bias", "qwen2_tied", "olmo2", "gemma3"])
def test_q_k_and_v_in_one_tensor(name, convert, tmp_path):
    """As llama.cpp reads them of any architecture."""
    path = rewritten(tmp_path / "fused.gguf", with_fused_rows(read_gguf(convert(GOLDEN / name))))
    assert relative(logits(path), logits(convert(GOLDEN / name))) < FLOAT32


def test_a_bias_of_qwen2_s_head(convert, tmp_path):
    """Which llama.cpp reads; it is added to the logits."""
    model = read_gguf(convert(GOLDEN / "qwen2_tied"))
    bias = np.linspace(-1, 1, len(model.tensor("token_embd.weight").values()), dtype=np.float32)
    path = rewritten(tmp_path / "model.gguf", model.with_tensors(Tensor.of("output.bias", bias)))
    assert np.allclose(logits(path), logits(convert(GOLDEN / "qwen2_tied")) + bias, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "none"])
def test_a_magnitude_without_yarn(kind, convert, tmp_path):
    """What rotates is times attn_factor, whatever scales its angles, as in llama.cpp; offline, too."""
    prefix = "llama.rope.scaling."
    fields = {"attn_factor": float32(0.7), "type": string(kind), "factor": float32(4 if kind == "linear" else 1)}
    model = read_gguf(convert(GOLDEN / "llama_linear")).with_metadata({prefix + key: v for key, v in fields.items()})
    path = rewritten(tmp_path / "model.gguf", model)
    assert relative(logits(path), Reference(path).logits(IDS)) < FLOAT32
    assert Rotation.of(model, Attention.of(model), 64).magnitude == pytest.approx(0.7)


def test_old_files_say_only_scale_linear(convert, tmp_path):
    """The runtime and what is measured offline read it alike."""
    model = read_gguf(convert(GOLDEN / "llama_linear"))
    said = {key: v for key, v in model.metadata.items() if "rope.scaling" not in key}
    old = ModelData(said | {"llama.rope.scale_linear": model.metadata["llama.rope.scaling.factor"]}, model.tensors)
    path = rewritten(tmp_path / "model.gguf", old)
    assert np.array_equal(logits(path), logits(convert(GOLDEN / "llama_linear")))
    ours, wanted = (Rotation.of(one, Attention.of(one), 64) for one in (old, model))
    assert np.array_equal(ours.frequencies, wanted.frequencies)


def test_attention_factor_as_llama_cpp_s_converter_writes_it(convert, tmp_path):
    """In a key of its own, where transformers' means all of the magnitude, not what multiplies YaRN's."""
    model = read_gguf(convert(GOLDEN / "llama_yarn"))
    usual, all_of_it = 1 + 0.1 * np.log(4.0), 1.3
    paths = [
        rewritten(tmp_path / f"{key}.gguf", model.with_metadata({f"llama.rope.scaling.{key}": float32(value)}))
        for key, value in (("yarn_attn_factor", all_of_it), ("attn_factor", all_of_it / usual))
    ]
    theirs, ours = map(logits, paths)
    assert relative(theirs, ours) < FLOAT32 and relative(ours, logits(convert(GOLDEN / "llama_yarn"))) > 1e-3
    assert relative(theirs, Reference(paths[0]).logits(IDS)) < FLOAT32
    assert [_magnitude(path) for path in paths] == pytest.approx([all_of_it] * 2)
    undone = model.with_metadata({"llama.rope.scaling.yarn_attn_factor": float32(1 / usual)})  # transformers ignores it
    path = rewritten(tmp_path / "undone.gguf", undone)
    assert _magnitude(path) == pytest.approx(usual)
    assert np.array_equal(logits(path), logits(convert(GOLDEN / "llama_yarn")))


def test_the_factor_of_phi_3_5_moe(convert, tmp_path):
    """Its configuration says one; llama.cpp's converter writes what follows from the lengths, as for Phi-3."""
    model, key = read_gguf(convert(GOLDEN / "phimoe")), "phimoe.rope.scaling.attn_factor"
    from_lengths = np.sqrt(1 + np.log(128 / 48) / np.log(48))
    own, *others = (
        rewritten(tmp_path / f"{i}.gguf", one)
        for i, one in enumerate((
            model.with_metadata({key: float32(1.243163121)}),
            model.with_metadata({key: float32(from_lengths)}),
            without(model, key),
        ))
    )  # fmt: skip
    assert [_magnitude(path) for path in (own, *others)] == pytest.approx([1.243163121] * 3)
    assert all(np.array_equal(logits(path), logits(own)) for path in others)
    assert _magnitude(convert(GOLDEN / "phimoe")) == pytest.approx(1.24)  # another that is said


def _magnitude(path) -> float:
    model = read_gguf(path)
    return Rotation.of(model, Attention.of(model), 0).magnitude


@pytest.mark.parametrize(("name", "key"), [("gptneox", "slimrt.activation"), ("phi2", "slimrt.activation"),
                                           ("gptneox", "gptneox.use_parallel_residual"),
                                           ("qwen3moe", "qwen3moe.feed_forward_length")])  # fmt: skip
def test_what_is_usual_may_be_left_out(name, key, convert, tmp_path):
    """The exact GELU in GPT-NeoX, tanh's in Phi-2, the parallel residual, the width of networks where there are but
    experts."""
    model = read_gguf(convert(GOLDEN / name))
    assert key in model.metadata
    path = rewritten(tmp_path / "model.gguf", without(model, key))
    assert np.array_equal(logits(path), logits(convert(GOLDEN / name)))


@pytest.mark.parametrize(("key", "value"), [("slimrt.activation", string("gelu_tanh")),
                                            ("gptneox.use_parallel_residual", boolean(False))])  # fmt: skip
def test_what_is_said_is_done(key, value, convert, tmp_path):
    path = rewritten(tmp_path / "model.gguf", read_gguf(convert(GOLDEN / "gptneox")).with_metadata({key: value}))
    wanted, usual = Reference(path).logits(IDS), logits(convert(GOLDEN / "gptneox"))
    assert relative(logits(path), wanted) < FLOAT32 < 1e-4 < relative(usual, wanted)


@pytest.mark.parametrize(("key", "value"), [("expert_weights_norm", boolean(True)),
                                            ("expert_weights_scale", float32(2.5))])  # fmt: skip
def test_shares_of_experts_are_what_the_file_says(key, value, convert, tmp_path):
    changed = read_gguf(convert(GOLDEN / "olmoe")).with_metadata({f"olmoe.{key}": value})
    path = rewritten(tmp_path / "model.gguf", changed)
    wanted, usual = Reference(path).logits(IDS), logits(convert(GOLDEN / "olmoe"))
    assert relative(logits(path), wanted) < FLOAT32 < 1e-4 < relative(usual, wanted)


def test_a_divided_magnitude(convert, tmp_path):
    """Ministral 3's as llama.cpp's converter says it, which is 1 for mscale_all_dim 1."""
    model, prefix = read_gguf(convert(GOLDEN / "ministral3")), "mistral3.rope.scaling."
    kept = without(model, prefix + "attn_factor").metadata
    path = rewritten(
        tmp_path / "model.gguf", ModelData(kept | {prefix + "yarn_log_multiplier": float32(1)}, model.tensors)
    )
    assert relative(logits(path), logits(convert(GOLDEN / "ministral3"))) < FLOAT32


def with_gate_and_up_apart(model: ModelData) -> ModelData:
    tensors = {}
    for name, tensor in model.tensors.items():
        halves = (
            zip(("gate", "up"), np.split(tensor.values(), 2, axis=1), strict=True) if "gate_up_exps" in name else ()
        )
        parts = {name.replace("gate_up", part): np.ascontiguousarray(half) for part, half in halves}
        tensors |= {part: Tensor.of(part, half) for part, half in parts.items()} or {name: tensor}
    return ModelData(model.metadata, tensors)


@pytest.mark.parametrize(("name", "mode"), [("gemma4_experts", "kv"), ("mistral4", "latent")])
def test_gate_and_up_of_experts_in_one_tensor_or_two(name, mode, convert, tmp_path):
    path = convert(GOLDEN / name)
    apart = rewritten(tmp_path / "apart.gguf", with_gate_and_up_apart(read_gguf(path)))
    assert (
        "blk.1.ffn_up_exps.weight" in read_gguf(apart).tensors
        and "blk.1.ffn_gate_up_exps.weight" in read_gguf(path).tensors
    )
    of_both = [decode(open_engine(file, mode, "f32", n_ctx=64), IDS, 30) for file in (path, apart)]
    assert np.array_equal(*of_both)


@pytest.mark.parametrize("part", ["router_norm", "norm", "post_norm", "dense_post_norm", "scales"])
def test_each_part_of_experts_beside_a_network_matters(part, convert):
    path = convert(GOLDEN / "gemma4_experts")
    whole, changed = Reference(path), Reference(path)
    for layer in changed.w.layers:
        of = layer.experts if part == "scales" else layer.beside
        setattr(of, part, np.ones_like(getattr(of, part)))
    assert relative(logits(path), whole.logits(IDS)) < 1e-2 * relative(changed.logits(IDS), whole.logits(IDS))


GROUPS = {"expert_count": uint32(6), "expert_group_count": uint32(3), "expert_group_used_count": uint32(2)}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("fields", [{}, GROUPS], ids=["all", "groups"])
@pytest.mark.parametrize("function", [1, 2])
def test_experts_are_chosen_as_the_file_says(function, fields, biased, convert, tmp_path):
    """Of a probability by sigmoids, of groups, with a bias for the choice: as DeepSeek-V2's and V3's files say it."""
    model = read_gguf(convert(GOLDEN / "olmoe"))
    said = {"expert_gating_func": uint32(function), "expert_weights_norm": boolean(True), **fields}
    tensors = dict(model.tensors)
    for layer in range(2):
        p = f"blk.{layer}."
        names = [f"{p}ffn_{part}.weight" for part in ("gate_inp", "gate_exps", "up_exps", "down_exps")]
        tensors |= {name: Tensor.of(name, tensors[name].values()[: 6 if fields else 7]) for name in names}
        if biased:
            bias = 0.3 * np.random.default_rng(layer).normal(size=6 if fields else 7)
            tensors[f"{p}exp_probs_b.bias"] = Tensor.of(f"{p}exp_probs_b.bias", bias.astype(np.float32))
    changed = model.with_metadata({f"olmoe.{key}": value for key, value in said.items()})
    path = rewritten(tmp_path / "model.gguf", ModelData(changed.metadata, tensors))
    whole, plain = Reference(path), Reference(path)
    assert relative(logits(path), whole.logits(IDS)) < FLOAT32
    for layer in plain.w.layers:
        layer.experts = replace(layer.experts, sigmoid=False, groups=(1, 1), bias=None)
    if function == 2 or fields or biased:
        assert relative(plain.logits(IDS), whole.logits(IDS)) > 1e-4


def test_a_bias_without_a_function_is_of_sigmoids(convert, tmp_path):
    """GLM-4.7-Flash's config names no function, and so does its GGUF."""
    path = convert(GOLDEN / "glm4_moe_lite")
    unsaid = rewritten(tmp_path / "model.gguf", without(read_gguf(path), "deepseek2.expert_gating_func"))
    ours, theirs = (decode(open_engine(one, "latent", "f32", n_ctx=64), IDS, 30) for one in (unsaid, path))
    assert np.array_equal(ours, theirs)


def test_a_bias_that_minimax_must_have(convert, tmp_path):
    model = read_gguf(convert(GOLDEN / "minimax_m2"))
    tensors = {name: tensor for name, tensor in model.tensors.items() if name != "blk.1.exp_probs_b.bias"}
    path = rewritten(tmp_path / "model.gguf", ModelData(model.metadata, tensors))
    with pytest.raises(slimrt.ModelFormatError, match=r"blk\.1\.exp_probs_b\.bias' is missing"):
        slimrt.Model(path)


@pytest.mark.parametrize(
    ("arch", "part"), [("gptneox", "rotation"), ("olmo2", "QK-norm"), ("qwen3", "QK-norm"), ("phi2", "head's bias")]
)
def test_each_part_matters(arch, part, tmp_path):
    """So that agreement with Hugging Face says something: the reference without the part gives other logits."""
    path = write_random(tmp_path / "model.gguf", Shape(32, 2, 4, 64, d_ff=48, n_vocab=60, arch=arch))
    whole, changed = Reference(path), Reference(path)
    if part == "rotation":
        for layer in changed.w.layers:
            layer.rope = replace(layer.rope, inv_freq=layer.rope.inv_freq[:2])
    elif part == "QK-norm":
        for layer in changed.w.layers:
            layer.k_norm = None
    else:
        changed.w.head_b = None
    assert relative(logits(path), whole.logits(IDS)) < 1e-2 * relative(changed.logits(IDS), whole.logits(IDS))


PARTS = {
    "embed_scale": ("gemma", 1.0),
    "score_cap": ("gemma2", 0.0),
    "logit_cap": ("gemma2", 0.0),
    "clamp": ("olmo_clipped", 0.0),
    "logit_scale": ("cohere", 1.0),
    "embed_norm": ("bloom", None),
    "residual_scale": ("minicpm", 1.0),
    "score_scale": ("granite", 0.0),
    "slopes": ("mpt", None),
    "query_growth": ("ministral3", 0.0),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_trait_matters(part, convert):
    """The same of what goldens have."""
    name, without_it = PARTS[part]
    path = convert(GOLDEN / name)
    whole, changed = Reference(path), Reference(path)
    setattr(changed.w, part, without_it)
    assert relative(logits(path), whole.logits(IDS)) < 1e-2 * relative(changed.logits(IDS), whole.logits(IDS))


def test_norms_before_w_o_and_down(convert):
    path = convert(GOLDEN / "bitnet")
    whole = Reference(path).logits(IDS)
    for norm in ("attn_sub_norm", "ffn_sub_norm"):
        changed = Reference(path)
        for layer in changed.w.layers:
            setattr(layer, norm, None)
        assert relative(logits(path), whole) < FLOAT32 < 1e-2 < relative(changed.logits(IDS), whole)


@pytest.mark.parametrize(
    ("n_layers", "said", "scale"), [(46, {}, 8**-0.5), (45, {}, 16**-0.5), (46, {"attention.scale": 0.2}, 0.2)]
)
def test_gemma_2_27b(n_layers, said, scale, tmp_path):
    """It scales scores by heads' share of the model, which is not their width: files tell it by its layers alone."""
    shape = Shape(32, n_layers, 4, 64, head_dim=16, n_vocab=60, arch="gemma2")
    path = write_random(tmp_path / "model.gguf", shape, said)
    model = Reference(path)
    model.w.score_scale = scale
    wanted = model.logits(IDS)
    assert relative(logits(path), wanted) < FLOAT32
    model.w.score_scale *= 1.4
    assert relative(model.logits(IDS), wanted) > 1e-2


def test_gemma_2_s_first_files(convert, tmp_path):
    """They lack the caps and the window of published models."""
    model = read_gguf(convert(GOLDEN / "gemma2"))
    keys = {
        "gemma2.attn_logit_softcapping": float32(50),
        "gemma2.final_logit_softcapping": float32(30),
        "gemma2.attention.sliding_window": uint32(4096),
    }
    first = ModelData({key: v for key, v in model.metadata.items() if key not in keys}, model.tensors)
    paths = [rewritten(tmp_path / f"{i}.gguf", one) for i, one in enumerate((first, model.with_metadata(keys)))]
    assert np.array_equal(*map(logits, paths))
    assert relative(logits(paths[0]), logits(convert(GOLDEN / "gemma2"))) > 1e-2
    of_8192 = [_core.plan(str(path), n_ctx=8192)["cache"] for path in paths]
    assert of_8192[0] == of_8192[1]
    assert Attention.of(first) == Attention.of(model.with_metadata(keys))


def test_k_of_qwen3_0_6b(tmp_path):
    """8 KV heads of 128 are as wide as the input: K alone and a factor for each head, where kv has K and V."""
    shape = Shape(1024, 28, 16, 4096, n_kv_heads=8, head_dim=128, d_ff=3072, n_vocab=151936, arch="qwen3")
    path = str(write_sparse(tmp_path / "model.gguf", shape))
    row = {mode: slimrt._core.plan(path, cache=mode, n_ctx=4096)["cache_bytes_per_token"] for mode in ("kv", "k")}
    assert row == {"kv": 28 * 2 * 1024 * 2, "k": 28 * (1024 * 2 + 8 * 4)}


def test_minicpm_s_first_files(convert, tmp_path):
    """They leave out the scales, which are those of MiniCPM-2B."""
    model = read_gguf(convert(GOLDEN / "minicpm"))
    said = {"embedding_scale": 12.0, "residual_scale": 1.4 / 2**0.5, "logit_scale": 48 / 256}
    fields = {f"minicpm.{key}": float32(value) for key, value in said.items()}
    whole = rewritten(tmp_path / "whole.gguf", model.with_metadata(fields))
    kept = {key: value for key, value in model.metadata.items() if not key.endswith("_scale")}
    first = rewritten(tmp_path / "first.gguf", ModelData(kept, model.tensors))
    assert relative(logits(first), Reference(whole).logits(IDS)) < FLOAT32


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("granite", "granite.logit_scale", 0.0, "logit_scale is 0"),
        ("cohere", "command-r.logit_scale", -1.0, "a scale in the metadata is -1"),
        ("olmo", "olmo.attention.clamp_kqv", -0.5, "clamp_kqv is -0.5"),
    ],
)
def test_scales_must_be_positive(name, key, value, words, convert, tmp_path):
    model = read_gguf(convert(GOLDEN / name)).with_metadata({key: float32(value)})
    with pytest.raises(slimrt.ModelFormatError, match=words):
        slimrt._core.Engine(str(rewritten(tmp_path / "model.gguf", model)))


def test_slopes_of_another_bias(convert, tmp_path):
    """MPT's alibi_bias_max, with heads that are no power of two."""
    changed = read_gguf(convert(GOLDEN / "mpt")).with_metadata({"mpt.attention.max_alibi_bias": float32(3.0)})
    path = rewritten(tmp_path / "model.gguf", changed)
    assert relative(logits(path), Reference(path).logits(IDS)) < FLOAT32
    assert Attention.of(changed).slopes == pytest.approx(Reference(path).w.slopes, rel=1e-12)


REFUSED = {
    "GLM-4V": (
        "glm4",
        {"glm4.rope.dimension_sections": array([2, 2, 2, 0], GGUFValueType.UINT32)},
        [],
        [],
        "GLM-4V's positions",
    ),
    "two scales of YaRN": (
        "deepseek2_yarn",
        {"deepseek2.rope.scaling.attn_factor": float32(0.7)},
        [],
        [],
        "attn_factor under YaRN is not supported",
    ),
    "Command R+": ("cohere", {}, ["blk.0.attn_q_norm.weight"], [], "Command R\\+"),
    "StableLM 2 12B": ("stablelm", {}, [], ["ffn_norm"], "StableLM 2 12B"),
    "MPT without ALiBi": ("mpt", {"mpt.attention.max_alibi_bias": float32(0.0)}, [], [], "max_alibi_bias is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_relatives_that_are_refused(case, convert, tmp_path):
    """In a sentence, not by the first tensor that is missing or one too many."""
    name, fields, more, fewer, words = REFUSED[case]
    model = read_gguf(convert(GOLDEN / name))
    tensors = {key: t for key, t in model.tensors.items() if not any(part in key for part in fewer)}
    tensors |= {key: Tensor.of(key, np.ones(12)) for key in more}
    path = rewritten(tmp_path / "model.gguf", ModelData(model.metadata | fields, tensors))
    with pytest.raises(slimrt.UnsupportedError, match=words):
        slimrt._core.Engine(str(path))


def test_yarn_of_latent_attention_must_say_how_it_scales_scores(convert, tmp_path):
    """Without the key transformers scales what rotates, and llama.cpp scores, too."""
    model, key = read_gguf(convert(GOLDEN / "deepseek2_yarn")), "deepseek2.rope.scaling.yarn_log_multiplier"
    path = rewritten(tmp_path / "model.gguf", without(model, key))
    with pytest.raises(slimrt.ModelFormatError, match=f"key '{key}' is missing"):
        slimrt._core.Engine(str(path))


def test_stablelm_s_key_of_the_residual_says_nothing(convert, tmp_path):
    """llama.cpp's converter writes true where config.json leaves it out."""
    model = read_gguf(convert(GOLDEN / "stablelm"))
    path = rewritten(tmp_path / "model.gguf", model.with_metadata({"stablelm.use_parallel_residual": boolean(True)}))
    assert np.array_equal(logits(path), logits(convert(GOLDEN / "stablelm")))


@pytest.mark.parametrize("outtype", ["f16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_smaller_weights(arch, outtype, tmp_path):
    """The engine computes with the weights as they are in the file. Beside quantised ones it rounds its activations, 32
    at a time to 8 bits, which is what q8_0 does to weights: it moves the logits about as far; twice is allowed."""
    plain = write_random(tmp_path / "plain.gguf", Shape(256, 2, 4, 64, d_ff=512, n_vocab=64, arch=arch))
    small, q8 = (
        slimrt.convert(plain, tmp_path / f"{name}.gguf", outtype=kind).path
        for name, kind in (("small", outtype), ("q8", "q8_0"))
    )
    kinds = {tensor.type.name for tensor in read_gguf(small).tensors.values()}
    assert {"f16": "F16", "q8_0": "Q8_0", "q4_k_m": "Q4_K"}[outtype] in kinds
    exact = Reference(plain).logits(IDS)
    rounding = 2 * rms(Reference(q8).logits(IDS) - exact)
    bound = FLOAT32 * rms(exact) if outtype == "f16" else rounding
    assert rms(logits(small) - Reference(small).logits(IDS)) < bound < 0.05 * rms(exact)


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "qwen3"])
def test_v_and_x_say_why_they_are_no_modes_here(arch, tmp_path):
    path = write_random(tmp_path / "model.gguf", Shape(32, 2, 4, 64, d_ff=48, n_vocab=60, arch=arch))
    reasons = {mode.name: mode.refusal for mode in slimrt.core.modes(str(path))}
    assert all(("QK-norm" if arch in ("olmo2", "qwen3") else "RoPE") in reasons[mode] for mode in "vx"), reasons
    assert reasons["kv"] == ""
