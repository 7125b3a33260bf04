# SPDX-License-Identifier: Apache-2.0
"""Configs whose keys of windows, and of RoPE by kinds of layers, contradict each other: as transformers has it, or
refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import ids_of, relative
from slimrt.modelfile.hf.directory import read_hf
from test_convert_directories import changed_config
from test_parity import PARITY, oracle, run

pytestmark = pytest.mark.unsanitized  # Python: the core computes the same models elsewhere

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS = {FULL: {"rope_theta": 1000.0}, SLIDING: {"rope_theta": 300.0}}


@pytest.mark.parametrize(
    ("scaling", "base"), [(YARN, 1000), (YARN | {"rope_theta": 50.0}, 50)], ids=["a scaling", "a scaling and its base"]
)
def test_a_scaling_beside_the_parameters_of_olmo_3_s_layers(scaling, base, tmp_path):
    """It is that of the layers without a window; the parameters of the kinds were dropped."""
    changes = {"rope_scaling": scaling, "rope_parameters": KINDS, "rope_theta": 77.0}
    model, _ = read_hf(changed_config(tmp_path, "olmo3", **changes))
    wanted = {"freq_base": base, "freq_base_swa": 300, "scaling.factor": 4, "scaling.original_context_length": 32}
    assert {key: model.value(f"olmo2.rope.{key}") for key in wanted} == wanted


def test_a_base_in_the_old_spelling_that_is_olmo_3_s_own(tmp_path):
    changes = {"rope_scaling": YARN, "rope_parameters": None, "rope_theta": 500000.0}
    model, _ = read_hf(changed_config(tmp_path, "olmo3", **changes))
    assert model.value("olmo2.rope.freq_base") == model.value("olmo2.rope.freq_base_swa") == 5e5


def logits_of_transformers(kind: str, directory: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    import transformers

    model = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()


@oracle
@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("olmo3", "Olmo3ForCausalLM", {"rope_scaling": YARN, "rope_parameters": KINDS}),
        ("olmo3", "Olmo3ForCausalLM", {"layer_types": [FULL, *[SLIDING] * 4], "sliding_window_pattern": 4}),
        ("cohere2", "Cohere2ForCausalLM", {"layer_types": [FULL, *[SLIDING] * 3], "sliding_window_pattern": 2}),
        ("exaone4", "Exaone4ForCausalLM", {"layer_types": None, "sliding_window_pattern": 3}),
    ],
)
def test_logits_are_those_of_transformers(name, kind, changes, tmp_path):
    directory, ids = changed_config(tmp_path, name, **changes), ids_of(0, 60)
    assert relative(run(directory, ids, 48, 64), logits_of_transformers(kind, directory, ids)) < PARITY


REFUSED = {
    "a base that layers with a window may have or not": (
        "olmo3", {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 1000.0}, "rope_theta = 1000.0"),
    "a scaling by kinds in the old spelling": (
        "olmo3", {"rope_parameters": None, "rope_scaling": {FULL: YARN}}, "rope_scaling of full_attention"),
    "a scaling of a type that is not read": (
        "gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "its type and no rope_type"),
    "a window of no tokens": ("exaone4", {"sliding_window": 0}, "sliding_window is 0"),
    "a window of no tokens in all layers": ("mistral_window", {"sliding_window": 0}, "sliding_window is 0"),
    "windows without a size": ("olmo3", {"sliding_window": None}, "says no size"),
    "windows without a size, by the usual pattern": (
        "exaone4", {"sliding_window": None, "layer_types": None}, "says no size"),
    "Cohere 2 without windows": (
        "cohere2", {"sliding_window": None, "layer_types": [FULL] * 4}, "sliding_window = None"),
    "Gemma 2 whose layers all see all": ("gemma2", {"layer_types": [FULL] * 3}, "layer_types = .*have a window"),
    "a pattern that Gemma 2 does not read": (
        "gemma2", {"layer_types": None, "sliding_window_pattern": 3}, "pattern = 3"),
    "a pattern that OLMo-3 does not read": ("olmo3", {"layer_types": None, "sliding_window_pattern": 2}, "pattern = 2"),
    "a pattern that gpt-oss does not read": (
        "gpt_oss_plain", {"layer_types": None, "sliding_window_pattern": 3}, "pattern = 3"),
    "layer types that Mistral does not read": (
        "mistral_window", {"layer_types": [FULL] * 2}, "0 of 2 layers is not supported: all layers of"),
    "a first window that Mistral does not read": ("mistral_window", {"max_window_layers": 2}, "0 of 2 layers"),
    "a window of Llama": ("llama_mha", {"sliding_window": 8}, "sliding_window = 8 is not supported for .*'llama'"),
    "a window of OLMo 2": ("olmo2", {"sliding_window": 8}, "sliding_window = 8 is not supported for .*'olmo2'"),
    "a window of StableLM": ("stablelm", {"sliding_window": 8, "use_sliding_window": True}, "for .*'stablelm'"),
    "layers of another kind": (
        "gemma3", {"layer_types": ["chunked_attention"] * 7}, "layer_types of chunked_attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_computes_otherwise_or_not_is_refused_by_name(case, tmp_path):
    name, changes, match = REFUSED[case]
    with pytest.raises((slimrt.UnsupportedError, slimrt.ModelFormatError), match=match):
        read_hf(changed_config(tmp_path, name, **changes))


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 8, "use_sliding_window": False}, {"sliding_window": 1 << 20}, {}]
)
def test_a_window_that_hides_nothing_is_none(changes, tmp_path):
    model, _ = read_hf(changed_config(tmp_path, "llama_mha", **changes))
    assert not [key for key in model.metadata if "sliding_window" in key]


@oracle
@pytest.mark.parametrize(("name", "kind"), [("mistral_window", "MistralForCausalLM"), ("phi3", "Phi3ForCausalLM")])
def test_use_sliding_window_is_no_key_of_families_that_always_have_one(name, kind, tmp_path):
    directory = changed_config(tmp_path, name, sliding_window=5, use_sliding_window=False)
    ids = ids_of(4, 24)
    with slimrt.Model(directory, n_ctx=24, cache="kv:f32", progress=False) as model:
        assert relative(model.logits(ids), logits_of_transformers(kind, directory, ids)) < 1e-4
