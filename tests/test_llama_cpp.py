# SPDX-License-Identifier: Apache-2.0
"""Converted files are llama.cpp's: names and keys against the tables of the gguf package, and with llama-cpp-python
(the extra `bench`) the logits of the same file."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

import slimrt
from conftest import GOLDEN, relative, values_of
from hf_models import MODELS
from reference_files import hf_tensors
from slimrt.modelfile.gguf import read_gguf, string, write_gguf
from slimrt.modelfile.hf.layout import as_ternary
from test_parity import golden, run

ARCHITECTURES = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
FLOAT32 = 1e-5  # relative to the largest logit
GELU_TABLE = 1e-3  # its GELU goes through a table of f16
UNREAD = (  # of which it does not read
    "gptneox_sequential",  # a tied head
    "olmo2_gqa",  # heads that are wider together than the input
    "deepseek2",  # that q has no latent, which it tells by the number of layers
    "deepseek2_groups",
    "phimoe",  # LayerNorm, and SparseMixer: it has RMS norms and softmax there
    "phimoe_plain",
)
WITHOUT = {  # compared without what it does not read in these architectures, or reads otherwise
    "gemma2_mha": r"attention\.(sliding_window_pattern|scale)",
    "gemma3_mha": r"attention\.(sliding_window_pattern|scale)",
    "exaone4": r"attention\.sliding_window.*",  # it has windows in models of 64 layers alone
    "gpt_oss": r"rope\.scaling\..*",  # its YaRN's ramp begins and ends at a pair
}
CAPPED = {"gemma4_mha": 30.0}  # it caps logits even where the file says nothing
ONE_EPSILON = 1e-4  # it has one for all norms
OTHER_EPSILON = ("glm4_moe_lite",)  # of the norms of latents
OWN_ACTIVATION = {"gelu_erf": "gelu_tanh", "relu_squared": "silu"}  # it knows no other of these architectures
GELU = ("bloom", "gemma", "gemma2", "gemma3", "gemma4")  # architectures that have it where the file does not say
NAMED = [
    name for name, tiny in MODELS.items() if tiny.family not in ("opt", "openlm")
]  # of which llama.cpp knows the architecture
WINDOWS = ("mistral_window", "mistral_mha", "phi3")  # which it does not honour in these architectures


def arch_of(path: Path) -> str:
    return read_gguf(path).arch


def keys_of(table: type) -> set[str]:
    """Every key that the package names, with {arch} in it."""
    found = set()
    for value in vars(table).values():
        found |= keys_of(value) if isinstance(value, type) else {value} if isinstance(value, str) else set()
    return found


@pytest.mark.parametrize("name", NAMED)
def test_tensors_and_keys_are_in_the_tables(name, convert):
    model = read_gguf(convert(GOLDEN / name))
    arch = ARCHITECTURES[model.arch]
    known = {TENSOR_NAMES[kind] for kind in MODEL_TENSORS[arch]} | {
        "rope_freqs",
        "rope_factors_long",
        "rope_factors_short",
    }
    stems = {".".join("{bid}" if part.isdecimal() else part for part in name.split(".")[:-1]) for name in model.tensors}
    assert stems <= known
    keys = {key.replace("{arch}", model.arch) for key in keys_of(gguf.Keys)}
    assert {key for key in model.metadata if not key.startswith("slimrt.")} <= keys


def place_of(stem: str, names: gguf.TensorNameMap) -> str:
    """The table has BLOOM's names without "transformer.", and lacks those of BitNet 2B-4T."""
    known = names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
    if known:
        return known
    _, _, layer, _, name = stem.split(".")
    assert name in ("attn_sub_norm", "ffn_sub_norm")
    return f"blk.{layer}.{name}"


@pytest.mark.parametrize("name", NAMED)
def test_tensors_are_where_llama_cpp_s_converter_puts_them(name, convert):
    """By content, whatever order their rows have, against the name table of the package."""
    path = convert(GOLDEN / name)
    ours, names = values_of(path), gguf.get_tensor_name_map(ARCHITECTURES[arch_of(path)], 8)
    for theirs, values in hf_tensors(GOLDEN / name).items():
        stem, _, part = theirs.replace("e_score_correction_bias", "e_score_correction.bias").rpartition(".")
        if part in ("layer_scalar", "gate_up_proj", "down_proj"):
            stem, part = theirs, "weight"
        if ours_of := {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}.get(part):  # Gemma 4's
            assert np.array_equal(ours[f"blk.{stem.split('.')[2]}.{ours_of}.scale"].ravel(), values), theirs
            continue
        if expert := re.search(r"\.experts\.(\d+)\.", stem):
            stem, index = stem.replace(expert[0], ".experts."), int(expert[1])
            stem = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", stem)  # Mixtral's converter
            assert np.array_equal(ours[f"{names.get_name(stem)}.{part}"][index], values), theirs
            continue
        if stem.endswith("input_linear"):  # Granite's: of each expert gate, then up
            for half, name_of_half in zip(np.split(values, 2, 1), ("gate", "up"), strict=True):
                assert np.array_equal(ours[f"blk.{stem.split('.')[2]}.ffn_{name_of_half}_exps.{part}"], half), theirs
            continue
        layout = re.search(r"layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?$", theirs)
        if (match := layout) and name.startswith("gpt_oss"):
            rows = values if match[3] else values.swapaxes(1, 2)
            of_parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if match[2] == "gate_up" else {"down": rows}
            for name_of_part, values_of_part in of_parts.items():
                kind = "bias" if match[3] else "weight"
                assert np.array_equal(ours[f"blk.{match[1]}.ffn_{name_of_part}_exps.{kind}"], values_of_part), theirs
            continue
        if part == "sinks":
            assert np.array_equal(ours[f"{names.get_name(theirs)}.weight"], values)
            continue
        if stem.endswith("kv_b_proj") and "blk.0.attn_k_b.weight" in ours:
            k, v = (ours[f"blk.{stem.split('.')[2]}.attn_{one}_b.{part}"] for one in "kv")
            heads = values.reshape(len(k), -1, values.shape[1])
            assert np.array_equal(np.concatenate([k.swapaxes(1, 2), v], axis=1), heads), theirs
            continue
        found = ours[f"{place_of(stem, names)}.{part}"]
        if name.startswith("gemma") and arch_of(path) != "gemma4" and "norm" in stem:
            values = (values + 1).astype(np.float32)
        if name == "bitnet_online" and "_proj" in stem:
            values = as_ternary(values.astype(np.float32), "F32")
        assert np.array_equal(np.sort(found, axis=None), np.sort(values, axis=None)), theirs


class LlamaCpp:
    """A file's logits by llama.cpp's C interface, K and V in f32."""

    def __init__(self, path: Path, n_ctx: int):
        import llama_cpp as c

        self.c = c
        self.log = c.llama_log_callback(lambda level, text, data: None)  # kept: it is called later
        c.llama_log_set(self.log, ctypes.c_void_p(0))
        c.llama_backend_init()
        params = c.llama_model_default_params()
        params.use_extra_bufts = False
        self.model = c.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads = n_ctx, n_ctx, 1
        params.type_k = params.type_v = int(gguf.GGMLQuantizationType.F32)
        params.flash_attn_type = 0
        self.context = c.llama_init_from_model(self.model, params)
        self.n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))

    def logits(self, ids: np.ndarray) -> np.ndarray:
        batch = self.c.llama_batch_init(len(ids), 0, 1)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(ids)
        assert self.c.llama_decode(self.context, batch) == 0
        rows = [self.c.llama_get_logits_ith(self.context, i) for i in range(len(ids))]
        logits = np.stack([np.ctypeslib.as_array(row, (self.n_vocab,)).copy() for row in rows])
        self.c.llama_batch_free(batch)
        return logits

    def close(self) -> None:
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


@pytest.mark.oracle
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python (the extra `bench`)")
@pytest.mark.parametrize("name", [name for name in NAMED if name not in (*WINDOWS, *UNREAD)])
def test_llama_cpp_computes_the_same(name, convert, tmp_path):
    """In float32, and with its own activation where its converter's files would not say another."""
    ids, n_prompt, _, n_ctx = golden(name, next(iter(MODELS[name].prompts)))
    path = slimrt.convert(GOLDEN / name, tmp_path / "model.gguf", outtype="f32", progress=False).path
    model = read_gguf(path)
    activation = model.value("slimrt.activation", "silu")
    if own := OWN_ACTIVATION.get(activation):
        path = tmp_path / "own.gguf"
        write_gguf(path, model.with_metadata({"slimrt.activation": string(own)}), show_progress=False)
    if unread := WITHOUT.get(name):
        path = tmp_path / "without.gguf"
        kept = {key: v for key, v in model.metadata.items() if not re.fullmatch(rf"{model.arch}\.{unread}", key)}
        write_gguf(path, replace(model, metadata=kept), show_progress=False)
    engine = LlamaCpp(path, n_ctx)
    theirs = engine.logits(ids)
    engine.close()
    layers = model.size("block_count") * (2 if model.size("embedding_length_per_layer_input", 0) else 1)  # with GELU
    bound = GELU_TABLE * max(1, layers / 3) if "gelu" in activation or model.arch in GELU else FLOAT32
    bound = ONE_EPSILON if name in OTHER_EPSILON else bound
    ours, cap = run(path, ids, n_prompt, n_ctx), CAPPED.get(name)
    assert relative(cap * np.tanh(ours / cap) if cap else ours, theirs) < bound
