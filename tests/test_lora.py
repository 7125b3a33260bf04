# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that a conversion merges: what it writes beside merged weights, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import slimrt
from conftest import GOLDEN, values_of
from lora_adapters import (
    ALPHA,
    RANK,
    Products,
    Weights,
    as_parts,
    directory,
    gguf_parts,
    products,
    save_adapter,
    save_gguf,
)
from reference_files import hf_tensors
from seq2seq_models import write
from slimrt.cli.command import main
from slimrt.errors import ModelFormatError, UnsupportedError

BASE = "llama_mha"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
PAIR, MAGNITUDE = {f"{Q}.lora_A.weight": (4, 48), f"{Q}.lora_B.weight": (48, 4)}, f"{Q}.lora_magnitude_vector"


def changed(name: str, found: Products, scale: float, dtype: str = "float32") -> Weights:
    """The weights with the products added, computed in float64."""
    weights = hf_tensors(GOLDEN / name)
    result = {}
    for module, (a, b) in found.items():
        delta = b.astype(np.float64) @ a
        result[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (
            delta.T if name.startswith("gpt2") else delta
        )
    return result


def same(got: Path, wanted: Path, tolerance: float = 1e-6) -> None:
    found, expected = values_of(got), values_of(wanted)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= tolerance * max(1.0, np.abs(value).max()), name


# ---------------------------------------------------------------- what is merged
@pytest.mark.parametrize(
    "name, modules",
    [
        (BASE, [Q, "model.layers.1.self_attn.v_proj", DOWN, "lm_head"]),
        ("gpt2_erf", ["transformer.h.0.attn.c_attn", "transformer.h.2.attn.c_proj"]),
        ("phi3", ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"]),
        ("gptneox", ["gpt_neox.layers.1.attention.query_key_value"]),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_adapter_of_peft_is_added_to_the_weights(tmp_path, name, modules, scale):
    found = products(name, modules)
    adapter = save_adapter(tmp_path / "adapter", as_parts(found))  # fan_in_fan_out is not read
    out = tmp_path / "out.gguf"
    slimrt.convert(directory(tmp_path / "base", name), out, lora=adapter if scale == 1 else f"{adapter}:{scale}")
    wanted = tmp_path / "wanted.gguf"
    slimrt.convert(directory(tmp_path / "merged", name, changed(name, found, scale * ALPHA / RANK)), wanted)
    same(out, wanted)
    with pytest.raises(AssertionError):  # the change is one that would be noticed
        same(out, convert_plainly(tmp_path / "plain.gguf", tmp_path / "base"))


def convert_plainly(out: Path, base: Path) -> Path:
    slimrt.convert(base, out)
    return out


def test_scales_ranks_and_weights_trained_whole(tmp_path):
    """alpha / sqrt(r), another alpha for some modules, a norm and a matrix in place of the model's."""
    found = products(BASE, [Q, DOWN])
    norm = np.linspace(0.5, 1.5, 48, dtype=np.float32)
    head = np.random.default_rng(5).normal(size=hf_tensors(GOLDEN / BASE)["lm_head.weight"].shape).astype(np.float32)
    whole = {"model.norm.weight": norm, "lm_head.weight": head}
    adapter = save_adapter(
        tmp_path / "adapter", as_parts(found) | whole, use_rslora=True, alpha_pattern={"mlp.down_proj": 10},
        modules_to_save=["norm", "lm_head"],
    )  # fmt: skip
    out, wanted = tmp_path / "out.gguf", tmp_path / "wanted.gguf"
    slimrt.convert(directory(tmp_path / "base"), out, lora=[adapter])
    weights = changed(BASE, {Q: found[Q]}, ALPHA / 2) | changed(BASE, {DOWN: found[DOWN]}, 10 / 2) | whole
    slimrt.convert(directory(tmp_path / "merged", weights=weights), wanted)
    same(out, wanted)


def test_biases_of_modules_that_were_trained_whole(tmp_path):
    """PEFT saves them with bias="all" three times: as trained, again, and as they were."""
    up, rng = "model.layers.1.mlp.up_proj", np.random.default_rng(6)
    own = hf_tensors(GOLDEN / "llama_bias")
    whole = {f"{up}.{part}": rng.normal(size=own[f"{up}.{part}"].shape) for part in ("weight", "bias")}
    repeated = {f"{up}.modules_to_save.bias": whole[f"{up}.bias"], f"{up}.original_module.bias": own[f"{up}.bias"]}
    found, out, wanted = products("llama_bias", [Q]), tmp_path / "out.gguf", tmp_path / "wanted.gguf"
    adapter = save_adapter(tmp_path / "adapter", as_parts(found) | whole | repeated, bias="all")
    slimrt.convert(directory(tmp_path / "base", "llama_bias"), out, lora=adapter)
    weights = changed("llama_bias", found, ALPHA / RANK) | whole
    slimrt.convert(directory(tmp_path / "merged", "llama_bias", weights), wanted)
    same(out, wanted)


def test_an_output_matrix_that_transformers_calls_lm_head_and_files_do_not(tmp_path):
    found = products("gptneox", ["embed_out"])
    adapter = save_adapter(tmp_path / "adapter", as_parts({"lm_head": found["embed_out"]}))
    out, wanted = tmp_path / "out.gguf", tmp_path / "wanted.gguf"
    slimrt.convert(directory(tmp_path / "base", "gptneox"), out, lora=adapter)
    weights = changed("gptneox", found, ALPHA / RANK)
    slimrt.convert(directory(tmp_path / "merged", "gptneox", weights), wanted)
    same(out, wanted)


def test_dora(tmp_path):
    """Equation 5 of Liu et al. 2024: m (W + s B A) / ||W + s B A||, a norm for each row."""
    found = products(BASE, [Q])
    magnitude = np.linspace(0.5, 2, 48, dtype=np.float32)
    parts = as_parts(found) | {f"{Q}.lora_magnitude_vector": magnitude}
    adapter = save_adapter(tmp_path / "adapter", parts, use_dora=True)
    out, wanted = tmp_path / "out.gguf", tmp_path / "wanted.gguf"
    slimrt.convert(directory(tmp_path / "base"), out, lora=adapter)
    direction = changed(BASE, found, ALPHA / RANK)[f"{Q}.weight"]
    weight = magnitude[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    slimrt.convert(directory(tmp_path / "merged", weights={f"{Q}.weight": weight}), wanted)
    same(out, wanted)


def test_two_adapters_and_an_embedding(tmp_path):
    """Both are added, an embedding's as A^T B^T; the file says what was merged."""
    rng = np.random.default_rng(4)
    embed = "model.embed_tokens"
    a, b = rng.normal(size=(RANK, 101)).astype(np.float32), rng.normal(size=(48, RANK)).astype(np.float32)
    first, second = products(BASE, [Q]), products(BASE, [Q, DOWN], seed=9)
    one = save_adapter(
        tmp_path / "one", as_parts(first) | {f"{embed}.lora_embedding_A": a, f"{embed}.lora_embedding_B": b}
    )
    two = save_adapter(tmp_path / "two", as_parts(second))
    out, wanted = tmp_path / "out.gguf", tmp_path / "wanted.gguf"
    slimrt.convert(directory(tmp_path / "base"), out, lora=[one, f"{two}:-1"])
    scale, weights = ALPHA / RANK, changed(BASE, second, -ALPHA / RANK)
    weights[f"{Q}.weight"] += scale * (first[Q][1] @ first[Q][0])
    weights[f"{embed}.weight"] = hf_tensors(GOLDEN / BASE)[f"{embed}.weight"] + scale * (b @ a).T
    slimrt.convert(directory(tmp_path / "merged", weights=weights), wanted)
    same(out, wanted)
    fields = gguf.GGUFReader(out).fields
    assert fields["slimrt.lora"].contents() == ["one:1", "two:-1"]  # not where they lay


@pytest.mark.parametrize("changing", ["embedding", "head", "both"])
def test_a_tied_head_that_differs_becomes_a_matrix_of_its_own(tmp_path, changing):
    """PEFT changes the token embedding where tokens are looked up, and the head where logits are computed."""
    tied, embed = GOLDEN / "llama_gqa_tied", "model.embed_tokens.weight"
    own = hf_tensors(tied)[embed]
    other = np.random.default_rng(2).normal(size=own.shape).astype(np.float32)
    a, b = np.ones((RANK, own.shape[1]), np.float32), np.ones((len(own), RANK), np.float32)
    parts, wanted = {
        "embedding": ({embed: other}, (other, own)),
        "head": ({"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b}, (own, own + ALPHA / RANK * (b @ a))),
        "both": ({embed: other, "lm_head.weight": other}, (other, None)),
    }[changing]
    slimrt.convert(tied, tmp_path / "out.gguf", lora=save_adapter(tmp_path / "adapter", parts))
    found, pair = values_of(tmp_path / "out.gguf"), products(tied.name, [Q])
    for name, value in zip(("token_embd.weight", "output.weight"), wanted, strict=True):
        assert (name not in found) if value is None else np.allclose(found[name], value), name
    both = directory(tmp_path / "both", tied.name, {"lm_head.weight": own})  # the head stored again
    slimrt.convert(both, tmp_path / "again.gguf", lora=tmp_path / "adapter")
    same(tmp_path / "again.gguf", tmp_path / "out.gguf", 0)
    tensors = {name: t.astype(np.float32) for name, t in hf_tensors(both).items() if name != embed}
    save_file(tensors, both / "model.safetensors")  # the head alone
    slimrt.convert(both, tmp_path / "alone.gguf", lora=tmp_path / "adapter")
    same(tmp_path / "alone.gguf", tmp_path / "out.gguf", 0)
    contradicting = directory(tmp_path / "contradicting", tied.name, {"lm_head.weight": own + 1})
    with pytest.raises(ModelFormatError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        slimrt.convert(contradicting, tmp_path / "none.gguf", lora=save_adapter(tmp_path / "q", as_parts(pair)))
    with slimrt.Model(tmp_path / "out.gguf") as model:
        assert np.isfinite(model.logits([1, 2])).all()


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2**-10), ("float32", 1e-6)])
def test_the_result_has_the_types_of_the_model(tmp_path, dtype, tolerance):
    found = products(BASE, [Q])
    adapter = save_adapter(tmp_path / "adapter", as_parts(found))
    out, wanted = tmp_path / "out.gguf", tmp_path / "wanted.gguf"
    slimrt.convert(directory(tmp_path / "base", dtype=dtype), out, lora=adapter)
    slimrt.convert(
        directory(tmp_path / "merged", weights=changed(BASE, found, ALPHA / RANK, dtype), dtype=dtype), wanted
    )
    same(out, wanted, tolerance)
    types = [{t.name: t.tensor_type for t in gguf.GGUFReader(file).tensors} for file in (out, wanted)]
    assert types[0] == types[1]


def test_a_text_model_in_a_wrapper(tmp_path):
    """Names of an adapter that was trained with the wrapper's modules around the text model, and without."""
    found = products(BASE, [Q])
    for prefix in ("", "model.language_model."):
        adapter = save_adapter(tmp_path / f"adapter{prefix}", {prefix + name.removeprefix("model." * bool(prefix)): t
                                                                for name, t in as_parts(found).items()})  # fmt: skip
        base = directory(tmp_path / f"base{prefix}")
        if prefix:
            tensors = load_file(base / "model.safetensors")
            wrapped = {key.replace("model.", prefix, 1): t for key, t in tensors.items()}
            save_file(wrapped, base / "model.safetensors")
            config = json.loads((base / "config.json").read_text())
            (base / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
        slimrt.convert(base, tmp_path / f"out{prefix}.gguf", lora=adapter)
    vision = {"vision_tower.layers.0.self_attn.q_proj.weight": np.ones((48, 48), np.float32)}
    save_file(wrapped | vision, base / "model.safetensors")
    with pytest.raises(UnsupportedError, match="changes nothing of the text part of a 'llava' model"):
        slimrt.convert(base, tmp_path / "none.gguf", lora=save_adapter(tmp_path / "vision", vision))
    same(tmp_path / "outmodel.language_model..gguf", tmp_path / "out.gguf", 0)


# ---------------------------------------------------------------- GGUF
@pytest.mark.parametrize("source", ["file", "directory"])
def test_an_adapter_in_gguf(tmp_path, convert, source):
    plain = convert(GOLDEN / BASE)
    weights = values_of(plain)
    parts = gguf_parts(weights, ["blk.0.attn_q.weight", "blk.1.ffn_down.weight", "token_embd.weight"])
    adapter = save_gguf(tmp_path / "adapter.gguf", parts)
    out = tmp_path / "out.gguf"
    slimrt.convert(plain if source == "file" else GOLDEN / BASE, out, lora=f"{adapter}:0.5")
    got = values_of(out)
    for name, value in weights.items():
        a, b = parts.get(f"{name}.lora_a"), parts.get(f"{name}.lora_b")
        delta = 0 if a is None else (b @ a.T).T if name == "token_embd.weight" else b @ a
        wanted = value + 0.5 * ALPHA / RANK * delta
        assert np.abs(got[name] - wanted).max() < 1e-5 * max(1, np.abs(wanted).max()), name


def test_quantised_weights_that_change_become_f16(tmp_path):
    base = Path(__file__).parent.parent / "models" / "tale-llama.gguf"
    quantised = tmp_path / "q8.gguf"
    slimrt.convert(base, quantised, outtype="q8_0")
    weights = values_of(quantised)
    adapter = save_gguf(tmp_path / "adapter.gguf", gguf_parts(weights, ["blk.0.attn_q.weight"]))
    out = tmp_path / "out.gguf"
    report = slimrt.convert(quantised, out, lora=adapter)
    assert any("1 weights in q8_0 become f16" in text for text in report.warnings)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert types["blk.0.attn_q.weight"] == "F16" and types["blk.0.attn_k.weight"] == "Q8_0"
    slimrt.convert(quantised, out, lora=adapter, outtype="q8_0")
    assert {t.tensor_type.name for t in gguf.GGUFReader(out).tensors} == {"F32", "Q8_0"}


@pytest.mark.unsanitized
def test_the_result_is_folded_and_verified(tmp_path):
    """All else is done to the merged model: errors are measured on it, and logits compared with its own."""
    base = Path(__file__).parent.parent / "models" / "tale-llama.gguf"
    adapter = save_gguf(tmp_path / "adapter.gguf", gguf_parts(values_of(base), ["blk.0.attn_v.weight"]))
    merged, two, one = (tmp_path / f"{name}.gguf" for name in ("merged", "two", "one"))
    for scale in (0.01, 0.02):  # the second is not compared with the first, which is still in the cache
        slimrt.convert(base, merged, lora=f"{adapter}:{scale}")
        wanted = slimrt.convert(merged, two, cache="k+r:q8", verify=True)
        report = slimrt.convert(base, one, cache="k+r:q8", lora=f"{adapter}:{scale}", verify=True)
        same(one, two, 0)
        assert report.verify == wanted.verify
        assert [layer.measured for layer in report.layers] == [layer.measured for layer in wanted.layers]


@pytest.mark.parametrize("name, v", [("llama_bias", "attn_v"), ("gptneox", "attn_qkv")])
def test_a_bias_that_was_moved_by_the_weight_that_changes(tmp_path, name, v):
    """Files of --cache have W_O b_V in the output bias: with another W_O it would be another model's."""
    plain, folded, out = (tmp_path / f"{one}.gguf" for one in ("plain", "folded", "out"))
    slimrt.convert(GOLDEN / name, plain)
    slimrt.convert(plain, folded, cache="kv")
    weights, arch = values_of(plain), gguf.GGUFReader(plain).fields["general.architecture"].contents()
    adapters = {
        one: save_gguf(tmp_path / one, gguf_parts(weights, [f"blk.0.{one}.weight"]), arch) for one in (v, "attn_output")
    }
    for base, adapter in ((plain, "attn_output"), (folded, v)):
        slimrt.convert(base, out, lora=adapters[adapter], overwrite=True)
    with pytest.raises(UnsupportedError, match="by which this file's V biases were multiplied"):
        slimrt.convert(folded, out, lora=adapters["attn_output"], overwrite=True)


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "parts, config, error, said",
    [
        ({}, {"peft_type": "IA3"}, UnsupportedError, "type 'IA3'"),
        ({}, {"layer_replication": [[0, 2]]}, UnsupportedError, "layer_replication is"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "changed the base model too"),
        ({}, {"lora_alpha": "six"}, ModelFormatError, "must be numbers"),
        ({}, {"lora_alpha": 10**400}, ModelFormatError, "must be numbers"),
        ({}, {"alpha_pattern": [1, 2]}, ModelFormatError, "alpha_pattern must be an object"),
        ({}, {"alpha_pattern": {"(": 2}}, ModelFormatError, r"alpha_pattern: '\(' is no regular expression"),
        ({}, {"r": "x"}, ModelFormatError, "must be positive whole numbers, got .'x'"),
        ({}, {"use_rslora": "false"}, ModelFormatError, "use_rslora must be true or false"),
        ({}, {}, ModelFormatError, "is empty"),
        (PAIR, {"r": 7}, ModelFormatError, "is of rank 4, and adapter_config.json says 7"),
        (PAIR, {"rank_pattern": {"q_proj": 2}}, ModelFormatError, "is of rank 4, and adapter_config.json says 2"),
        (PAIR, {"use_dora": True}, ModelFormatError, "has no magnitude, and use_dora is True"),
        (PAIR | {MAGNITUDE: (48,)}, {}, ModelFormatError, "has a magnitude, and use_dora is None"),
        (PAIR | {MAGNITUDE: (47,)}, {"use_dora": True}, ModelFormatError, "has 47 magnitudes for 48 rows"),
        (PAIR | {f"{Q}.lora_A": (4, 48)}, {}, ModelFormatError, "are the same part of an adapter"),
        (PAIR | {name.replace("model.", ""): shape for name, shape in PAIR.items()}, {}, ModelFormatError, "again in"),
        ({name.replace("layers", "encoder.layers"): shape for name, shape in PAIR.items()}, {}, ModelFormatError,
         "'model.encoder.layers.0.self_attn.q_proj.weight', which this one does not have"),
        ({f"{Q}.lora_A.weight": (4, 48)}, {}, ModelFormatError, "lora_A without lora_B"),
        ({f"{Q}.lora_A.weight": (4, 48), f"{Q}.lora_B.weight": (48, 5)}, {}, ModelFormatError, "no product"),
        ({f"{Q}.lora_A.weight": (4, 40), f"{Q}.lora_B.weight": (48, 4)}, {}, ModelFormatError, "of another model"),
        ({"model.layers.7.mlp.up_proj.lora_A.weight": (4, 48), "model.layers.7.mlp.up_proj.lora_B.weight": (88, 4)}, {},
         ModelFormatError, "'model.layers.7.mlp.up_proj.weight', which this one does not have"),
        ({f"{Q}.lora_A.weight": (4, 48, 3), f"{Q}.lora_B.weight": (48, 4, 1)}, {}, UnsupportedError, "convolution"),
        ({f"{Q}.lora_C.weight": (4, 48)}, {}, UnsupportedError, "no part of a LoRA adapter"),
        ({"model.embed_tokens.lora_embedding_A": (4, 101), "model.embed_tokens.lora_embedding_B": (48, 4),
          "model.embed_tokens.lora_magnitude_vector": (48,)}, {}, UnsupportedError, "DoRA of an embedding"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path, parts, config, error, said):
    adapter = save_adapter(
        tmp_path / "adapter", {name: np.ones(shape, np.float32) for name, shape in parts.items()}, **config
    )
    with pytest.raises(error, match=said):
        slimrt.convert(GOLDEN / BASE, tmp_path / "out.gguf", lora=adapter)
    assert not (tmp_path / "out.gguf").exists()


def test_adapters_that_do_not_fit_the_model(tmp_path, convert):
    plain, found = convert(GOLDEN / BASE), products(BASE, [Q])
    peft = save_adapter(tmp_path / "peft", as_parts(found))
    out = tmp_path / "out.gguf"
    with pytest.raises(UnsupportedError, match="is an adapter of PEFT"):
        slimrt.convert(plain, out, lora=peft)
    parts = gguf_parts(values_of(plain), ["blk.0.attn_q.weight"])
    for name, said, error in (
        ("arch", "of architecture 'gpt2', not 'llama'", ModelFormatError),
        ("kind", "an adapter of type 'vector'", UnsupportedError),
        ("general", "is no adapter", ModelFormatError),
    ):
        value = {"arch": "gpt2", "kind": "vector", "general": "model"}[name]
        adapter = save_gguf(tmp_path / f"{name}.gguf", parts, **{name: value})
        with pytest.raises(error, match=said):
            slimrt.convert(plain, out, lora=adapter)
    half = save_gguf(tmp_path / "half.gguf", {"blk.0.attn_q.weight.lora_a": parts["blk.0.attn_q.weight.lora_a"]})
    with pytest.raises(ModelFormatError, match="has lora_a alone"):
        slimrt.convert(plain, out, lora=half)
    wide = save_gguf(tmp_path / "wide.gguf", {name.replace("attn_q", "ffn_up"): t for name, t in parts.items()})
    with pytest.raises(ModelFormatError, match=r"'blk.0.ffn_up.weight' is \[88, 48\]"):
        slimrt.convert(plain, out, lora=wide)
    for adapter, said in (
        (save_gguf(tmp_path / "empty.gguf", {}), "an adapter that changes nothing"),
        (save_gguf(tmp_path / "alpha.gguf", parts, alpha=float("nan")), "alpha must be a finite number, got nan"),
    ):
        with pytest.raises(ModelFormatError, match=said):
            slimrt.convert(plain, out, lora=adapter)
    huge = save_gguf(tmp_path / "huge.gguf", {name: t * 1e30 for name, t in parts.items()})
    with pytest.raises(ModelFormatError, match="not finite"):
        slimrt.convert(plain, out, lora=huge)
    assert not out.exists()


def test_an_adapter_of_gpt_2_in_gguf_is_refused(tmp_path, convert):
    """llama.cpp's converter turns the products as if they were weights: a square one would be merged transposed."""
    plain = convert(GOLDEN / "gpt2_erf")
    adapter = save_gguf(tmp_path / "a.gguf", gguf_parts(values_of(plain), ["blk.0.attn_output.weight"]), arch="gpt2")
    with pytest.raises(UnsupportedError, match="products transposed: merge the adapter as PEFT saved it"):
        slimrt.convert(plain, tmp_path / "out.gguf", lora=adapter)


def test_a_tied_embedding_is_not_changed_alone_in_gguf(tmp_path):
    """The product is added where tokens are looked up and not where logits are computed: one matrix cannot be both."""
    tied = GOLDEN / "llama_gqa_tied"
    width = hf_tensors(tied)["model.embed_tokens.weight"].shape[1]
    a, b = np.ones((101, 4), np.float32), np.ones((width, 4), np.float32)
    adapter = save_gguf(tmp_path / "a.gguf", {"token_embd.weight.lora_a": a, "token_embd.weight.lora_b": b})
    with pytest.raises(UnsupportedError, match="the token embedding alone"):
        slimrt.convert(tied, tmp_path / "out.gguf", lora=adapter)


def test_what_an_adapter_has_beside_its_weights_is_not_used(tmp_path):
    """Another end of text is told of, a missing one is none; a tokenizer.json that cannot be read stops nothing."""
    adapter, base = save_adapter(tmp_path / "adapter", as_parts(products(BASE, [Q]))), directory(tmp_path / "base")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for folder, eos in ((base, "a"), (adapter, None)):
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert not slimrt.convert(base, tmp_path / "0.gguf", lora=adapter).warnings
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b", "chat_template": "x"}))
    report = slimrt.convert(base, tmp_path / "1.gguf", lora=adapter)
    assert report.warnings == [
        f"{adapter} has its own end of text, chat template: not used, the result has what {base} has"
    ]
    (adapter / "tokenizer.json").write_text("{")
    report = slimrt.convert(base, tmp_path / "2.gguf", lora=adapter)
    assert "whether the adapter was trained with the tokens of" in report.warnings[0]


def test_weights_that_are_more_than_they_seem_are_refused(tmp_path):
    """Ternary ones, beside which PEFT computes the product, and an embedding that encoder and decoder share."""
    adapter = save_adapter(tmp_path / "adapter", as_parts(products("bitnet_online", [Q])))
    with pytest.raises(UnsupportedError, match=f"changes '{Q}.weight', which becomes ternary"):
        slimrt.convert(GOLDEN / "bitnet_online", tmp_path / "out.gguf", lora=adapter)
    base = write("t5", tmp_path / "t5")
    whole = {"shared.weight": load_file(base / "model.safetensors")["shared.weight"]}
    with pytest.raises(UnsupportedError, match="changes 'shared.weight', which is in several places"):
        slimrt.convert(base, tmp_path / "out.gguf", lora=save_adapter(tmp_path / "whole", whole))
    head = {"lm_head.weight": whole["shared.weight"]}
    with pytest.raises(UnsupportedError, match="changes .lm_head.weight., and the output matrix .* token embedding"):
        slimrt.convert(base, tmp_path / "out.gguf", lora=save_adapter(tmp_path / "head", head))


def test_an_adapter_beside_a_model_is_not_forgotten(tmp_path):
    both = save_adapter(directory(tmp_path / "both").parent / "both", as_parts(products(BASE, [Q])))
    report = slimrt.convert(both, tmp_path / "out.gguf")
    assert f"the adapter in {both} is not merged: slimrt convert --lora {both} does it" in report.warnings
    report = slimrt.convert(both, tmp_path / "out.gguf", lora=both)
    assert not any("is not merged" in text for text in report.warnings)


def test_scales_that_are_none(tmp_path):
    adapter = save_adapter(tmp_path / "adapter", {"model.norm.weight": np.ones(48, np.float32)})
    with pytest.raises(UnsupportedError, match=r"'model.norm.weight' was trained whole, .* leave out 0.5"):
        slimrt.convert(GOLDEN / BASE, tmp_path / "out.gguf", lora=f"{adapter}:0.5")
    for scale in ("nan", "-inf", "1e39"):
        with pytest.raises(ValueError, match="must be a finite number"):
            slimrt.convert(GOLDEN / BASE, tmp_path / "out.gguf", lora=f"{adapter}:{scale}")


def test_the_command(tmp_path, capsys):
    adapter = save_adapter(tmp_path / "my:adapter", as_parts(products(BASE, [Q])))  # a colon of its own
    out = tmp_path / "out.gguf"
    assert (
        main(["convert", str(GOLDEN / BASE), "--lora", f"{adapter}:0.5", "--lora", str(adapter), "-o", str(out)]) == 0
    )
    assert out.exists()
    assert (
        main(["convert", str(GOLDEN / BASE), "--lora", str(tmp_path / "none:2"), "-o", str(tmp_path / "x.gguf")]) != 0
    )
    assert f"{tmp_path / 'none'}: no such adapter" in capsys.readouterr().err
    assert main(["inspect", str(adapter)]) != 0
    assert f"slimrt convert MODEL --lora {adapter} -o OUT" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", str(out), "-p", "a", "--lora", str(adapter)])
    assert "slimrt convert MODEL --lora ADAPTER[:SCALE]" in capsys.readouterr().err
    kept = save_gguf(tmp_path / "adapter.gguf", gguf_parts(values_of(out), ["blk.0.attn_q.weight"]))
    assert main(["inspect", str(kept)]) == 0
    assert f"is no model but an adapter: slimrt convert MODEL --lora {kept} -o OUT" in capsys.readouterr().out


# ---------------------------------------------------------------- beside PEFT
def options(name: str) -> dict[str, object]:
    return {
        "plain": {"target_modules": "all-linear"},
        "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 2},
                   "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
        "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        "whole": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"], "bias": "all"},
        "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
        "conv1d": {"target_modules": ["c_attn", "c_proj", "lm_head"]},
        "conv1d_dora": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    }[name]  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["plain", "rslora", "dora", "whole", "embedding", "conv1d", "conv1d_dora"])
def test_as_peft_merges(tmp_path, name):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    base = GOLDEN / ("gpt2_erf" if name.startswith("conv1d") else "llama_bias" if name == "whole" else BASE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, **options(name))
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for value in (one for one in adapted.parameters() if one.requires_grad):
            value.add_(0.2 * torch.randn(value.shape))
    adapted.save_pretrained(tmp_path / "adapter")
    slimrt.convert(base, tmp_path / "out.gguf", lora=tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    slimrt.convert(tmp_path / "merged", tmp_path / "wanted.gguf")
    same(tmp_path / "out.gguf", tmp_path / "wanted.gguf", 2e-6)
