# SPDX-License-Identifier: Apache-2.0
"""What the core says of modes and architectures is what its planner counts and what conversions write."""

from __future__ import annotations

import pytest

import slimrt
from conftest import GOLDEN
from slimrt import core
from slimrt.folding.attention import Attention
from slimrt.modelfile.gguf import read_gguf
from slimrt.modelfile.hf.encoder_decoders import ENCODER_DECODERS
from slimrt.modelfile.hf.experts import EXPERTS
from slimrt.modelfile.hf.families import FAMILIES
from slimrt.modelfile.hf.gpt_families import GPT_FAMILIES
from slimrt.modelfile.hf.layered_families import LAYERED_FAMILIES
from slimrt.modelfile.hf.llama_families import LLAMA_FAMILIES
from slimrt.modes import CACHE_TYPES, FOLD_SUFFIXES, FOLDED


@pytest.mark.parametrize(
    "name", ["llama_gqa_tied", "gptneox", "gpt2_erf", "olmo2", "qwen3", "bloom", "olmo_clipped", "gemma3"]
)
@pytest.mark.parametrize("type", CACHE_TYPES)
def test_planes_are_what_a_token_takes(name, type, convert):
    path = str(convert(GOLDEN / name))
    n_layers = core.plan(path)["n_layers"]
    attention = Attention.of(read_gguf(convert(GOLDEN / name)))
    for mode, said in attention.modes(type, 8, "q8").items():
        if not said.legal:
            continue
        residual = {"rank": 8, "residual_type": "q8"} if said.residual else {}
        counted = core.plan(path, cache=mode, cache_type_k=type, cache_type_v=type, **residual)
        assert counted["cache_bytes_per_token"] == n_layers * said.bytes, mode


@pytest.mark.parametrize(
    ("name", "mode"), [("llama_mha", "k"), ("llama_mha", "k+r"), ("gpt2_erf", "v"), ("gptneox", "xr")]
)
def test_folds_are_what_a_conversion_writes(name, mode, convert, tmp_path):
    source, out = convert(GOLDEN / name), tmp_path / "out.gguf"
    slimrt.convert(source, out, cache=mode, cache_type="f16", calibration="none", progress=False)
    plain, made = core.GgufFile(str(source)).tensors(), core.GgufFile(str(out)).tensors()
    written = {tensor.removeprefix("blk.0.") for tensor in made if tensor.startswith("blk.0.") and tensor not in plain}
    folds = {fold.suffix: fold for fold in next(one for one in core.modes(str(out)) if one.name == mode).folds}
    assert {suffix for suffix, fold in folds.items() if fold.required} <= written <= folds.keys()
    for suffix in written:
        rows, cols = made[f"blk.0.{suffix}"][1]
        assert folds[suffix].rows in (rows, 0) and folds[suffix].cols in (cols, 0), suffix  # 0: as wide as the rank
    assert FOLDED[mode] in written and all(f".{suffix}" in FOLD_SUFFIXES for suffix in written)


def test_architectures_rotate_as_their_families_do():
    known = core.architectures()
    for family in [
        *FAMILIES.values(),
        *LLAMA_FAMILIES.values(),
        *LAYERED_FAMILIES.values(),
        *GPT_FAMILIES.values(),
        *EXPERTS.values(),
    ]:
        one = known[family.arch]
        assert (one.rope, one.has_encoder) == (family.rope, False), family.arch
        neighbours = bool(family.permuted) or family.arch in ("command-r", "cohere2", "glm4")  # stored as they turn
        assert one.interleaved == neighbours, family.arch
        assert one.alibi == (family.arch in ("bloom", "mpt"))
    assert all(known[family.arch].has_encoder for family in ENCODER_DECODERS.values())
    assert {one.name for one in known.values() if not one.scaled_scores} == {"t5", "gemma4", "chronos2"}
    norms = {one.name: one.qk_norm for one in known.values() if one.qk_norm != "none"}
    rows, heads = ("olmo2", "openlm", "olmoe", "minimax-m2"), ("qwen3", "qwen3moe", "gemma3", "gemma4", "exaone4")
    assert norms == dict.fromkeys(rows, "row") | dict.fromkeys(heads, "head")


def test_sizes_that_no_attention_has():
    with pytest.raises(ValueError, match="no attention has these sizes"):
        core.attention_modes(d_model=8, n_heads=0, n_kv_heads=1, head_dim=4, n_rot=0, qk_norm="none")
    with pytest.raises(slimrt.UnsupportedError, match="cache type 'q5'"):
        core.attention_modes(d_model=8, n_heads=2, n_kv_heads=2, head_dim=4, n_rot=0, qk_norm="none", type="q5")
