# SPDX-License-Identifier: Apache-2.0
"""How a cache is named, what is filled in where nothing is said, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFValueType

import slimrt
from slimrt import CacheConfig
from slimrt.cache.config import CacheChoice, LayerCache, kinds, row_type
from slimrt.modelfile.gguf import Tensor, array, read_gguf, write_gguf
from slimrt.modelfile.source import ModelSource
from slimrt.modes import default_residual
from tiny_model import write_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """source(n_layers, stored, folded): a model whose V is 256 wide; what is stored for its layers, and ranks that
    some are folded with."""

    def made(n_layers=2, stored=None, folded=None) -> ModelSource:
        path = write_tiny(tmp_path_factory.mktemp("source") / "model.gguf", d=256, n_layers=n_layers)
        model = read_gguf(path)
        for name, key in (("mode", "modes"), ("type", "types"), ("residual", "residual_types")) if stored else ():
            values = array([layer[name] for layer in stored], GGUFValueType.STRING)
            model = model.with_metadata({f"slimrt.cache.{key}": values})
        for layer, rank in (folded or {}).items():
            v, out = np.zeros((256, 256)), np.zeros((256, rank))
            model = model.with_tensors(
                Tensor.of(f"blk.{layer}.attn_kr_v.weight", v), Tensor.of(f"blk.{layer}.attn_kr_out.weight", out)
            )
        write_gguf(path.with_name("source.gguf"), model, show_progress=False)
        return ModelSource(path.with_name("source.gguf"))

    return made


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("kv", CacheConfig("kv")),
        ("kv:q8", CacheConfig("kv", "q8")),
        ("k+r:q8:64:q4", CacheConfig("k+r", "q8", 64, "q4")),
        ("k+r::0", CacheConfig("k+r", "auto", 0)),
        ("k+r:::f16", CacheConfig("k+r", "auto", None, "f16")),
        ("xr:f16", CacheConfig("xr", "f16")),
        ("auto", CacheConfig("auto")),
    ],
)
def test_text_and_config_say_the_same(text, config):
    assert CacheConfig.parse(text) == config and str(config) == text
    assert CacheConfig.parse(str(config)) == config == CacheConfig.of(config)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("k+r:q8:64:q4:x", ValueError, "too many parts"),
        ("k+r:q8:many", ValueError, "'many' is not a whole number"),
        ("k+r:q8:-4", ValueError, "'-4' is not a whole number"),
        ("k+r:q9", slimrt.UnsupportedError, "did you mean 'q8'?"),
        ("k+r:q8:4:auto", slimrt.UnsupportedError, "residual type 'auto'"),
        ("kv:q8:64", ValueError, "cache mode 'kv' has no residual"),
        ("k:q8::q4", ValueError, "cache mode 'k' has no residual"),
        (":q8", ValueError, "cache must be a mode"),
    ],
)
def test_texts_that_say_nothing(text, error, said):
    with pytest.raises(error, match=said.replace("?", r"\?")):
        CacheConfig.parse(text)


def test_kinds_of_arguments():
    with pytest.raises(TypeError, match="rank must be a whole number"):
        CacheConfig("k+r", rank=1.5)
    with pytest.raises(ValueError, match="rank must not be negative"):
        CacheConfig("k+r", rank=-1)
    with pytest.raises(TypeError, match="allow_lossy must be true or false, got 'no'"):  # it would insist
        CacheChoice.of("k", allow_lossy="no")
    with pytest.raises(TypeError, match="a cache is a mode"):
        CacheChoice.of(["kv", 3])
    for nothing in ([], None, 3):
        with pytest.raises(ValueError, match="cache must be a mode"):
            CacheChoice.of(nothing)
    with pytest.raises(ValueError, match="no layer has it: kv, k:q8"):
        CacheChoice.of(["kv", "k:q8"], rank=4)


@pytest.mark.parametrize(
    ("type", "e_v", "expected"),
    [
        ("f32", 256, (16, "q8")),
        ("f16", 4096, (256, "q8")),
        ("bf16", 200, (12, "q8")),  # 12.5 rounded down to a multiple of 4
        ("q8", 256, (64, "q4")),
        ("fp8_e4m3", 256, (64, "q8")),
        ("fp8_e5m2", 256, (64, "q8")),
        ("q4", 256, (64, "q4")),
        ("f16", 32, (4, "q8")),  # at least 4
        ("q8", 2, (2, "q4")),  # but no wider than V
    ],
)
def test_default_residuals(type, e_v, expected):
    assert default_residual("k+r", type, e_v) == expected
    assert default_residual("kv", type, e_v) == (0, "")


def test_what_is_open_is_filled_in(source):
    layers = CacheChoice.of("k+r").layers(source())
    assert layers == (LayerCache("k+r", "f16", "f16", 16, "q8"),) * 2
    layers = CacheChoice.of(["k+r:q8", "kv"], "f32", rank=32).layers(source())
    assert layers == (LayerCache("k+r", "q8", "q8", 32, "q4"), LayerCache("kv", "f32", "f32"))
    assert CacheChoice.of("kv", "q8", cache_type_v="q4").layers(source(1)) == (LayerCache("kv", "q8", "q4"),)
    assert CacheChoice.of("kv:f32", "q8", cache_type_v="q4").layers(source(1)) == (LayerCache("kv", "f32", "f32"),)
    layers = CacheChoice.of("k+r:q8:8", residual_type="f16", rank=4).layers(source(1))
    assert layers == (LayerCache("k+r", "q8", "q8", 8, "f16"),)


def test_the_file_says_what_was_chosen_for_it(source):
    stored = [
        {"mode": "k+r", "type": "q8", "residual": "f16"},
        {"mode": "kv", "type": "q8", "residual": ""},
    ]
    file = source(stored=stored, folded={0: 20})
    chosen = (LayerCache("k+r", "q8", "q8", 20, "f16"), LayerCache("kv", "q8", "q8"))
    assert CacheChoice.of("auto").layers(file) == chosen
    assert CacheChoice.of("auto", "f16").layers(file)[0] == LayerCache("k+r", "f16", "f16", 20, "f16")
    # what was chosen for another mode says nothing: layer 1 of k+r is on its own, and layer 0 of kv
    assert CacheChoice.of("k+r").layers(file) == (chosen[0], LayerCache("k+r", "f16", "f16", 16, "q8"))
    assert CacheChoice.of("kv").layers(file) == (LayerCache("kv", "f16", "f16"), chosen[1])
    with pytest.raises(ValueError, match="rank 20 in layer 0, not 8"):
        CacheChoice.of("k+r", rank=8).layers(file)


def test_what_a_model_cannot_have(source):
    with pytest.raises(ValueError, match="3 cache modes were given for 2 layers"):
        CacheChoice.of(["kv"] * 3).layers(source())
    with pytest.raises(ValueError, match="wider than V: layer 0 has 256"):
        CacheChoice.of("k+r::260").layers(source())
    with pytest.raises(ValueError, match="no layer has it: kv"):  # what "auto" comes to is known here
        CacheChoice.of("auto", rank=4).layers(source())
    assert CacheChoice.of(["auto", "k+r"], rank=4).layers(source())[1].rank == 4


def test_the_core_is_given_one_value_where_all_agree(source):
    given = CacheChoice.of("k+r:q8").arguments(source())
    assert given["cache"] == "k+r" and given["cache_type_k"] == "q8"
    assert (given["rank"], given["residual_type"]) == (64, "q4")
    mixed = CacheChoice.of(["k+r:q8", "kv:f16"]).arguments(source())
    assert mixed["cache"] == ["k+r", "kv"] and mixed["cache_type_k"] == ["q8", "f16"]
    assert (mixed["rank"], mixed["residual_type"]) == ([64, 0], ["q4", "auto"])
    assert "rank" not in CacheChoice.of("kv").arguments(source())


def test_levels_are_the_type_of_rows_that_age(source):
    """Of V too, unless one type is given for it; other modes know no levels, and get none when a plan looks at them."""
    text = "q2@0.25+q4*0.2+sinks=8"
    config = CacheConfig.parse(f"lowrank:{text}")
    assert config == CacheConfig("lowrank", text) and str(config) == f"lowrank:{text}"
    choice = CacheChoice.of(["lowrank:q2+q4", "kivi:q3"])
    assert choice.layers(source()) == (LayerCache("lowrank", "q2+q4*0.1", "auto"), LayerCache("kivi", "q3", "auto"))
    assert CacheChoice.of("lowrank").layers(source(1)) == (LayerCache("lowrank", "q2@0.5+q4*0.1", "auto"),)
    halves = CacheChoice.of("kivi", cache_type_k="q4", cache_type_v="q2").layers(source(1))
    assert halves == (LayerCache("kivi", "q4/q2", "auto"),)
    choice = CacheChoice.of(f"lowrank:{text}")
    assert choice.with_mode("lowrank").layers(source(1)) == (LayerCache("lowrank", text, "auto"),)
    assert choice.with_mode("kv").layers(source(1)) == (LayerCache("kv", "f16", "f16"),)
    assert CacheChoice.of("kivi:q2+q4").with_mode("kv").layers(source(1)) == (LayerCache("kv", "f16", "f16"),)
    assert CacheChoice.of("kivi:q4").with_mode("kv").layers(source(1)) == (LayerCache("kv", "q4", "q4"),)
    for wrong in ("kv:q2+q4", "k+r:q2@0.5"):
        with pytest.raises(slimrt.UnsupportedError, match="cache type"):
            CacheConfig.parse(wrong)
    with pytest.raises(ValueError, match="no residual"):
        CacheConfig.parse("lowrank:q2:8")


def test_names_for_people():
    plain = {"mode": "kv", "type": "f16"}
    wide = {"mode": "k+r", "type": "q8", "rank": 64, "residual_type": "q4"}
    assert row_type(plain) == "f16" and row_type(wide) == "q8 + 64 q4"
    assert row_type(wide | {"rank": 0, "residual_type": ""}) == "q8"
    assert kinds([plain, wide, plain]) == "k+r q8 + 64 q4, kv f16"


def test_models_take_every_form(tiny):
    for cache in ("kv:f32", CacheConfig("kv", "f32"), ["kv:f32", CacheConfig("kv", "f32")]):
        with slimrt.Model(tiny, n_ctx=64, cache=cache) as model:
            assert [(one["mode"], one["type"]) for one in model.info()["layers"]] == [("kv", "f32")] * 2
            used = model.generate("a", max_tokens=2, ignore_eos=True).cache
            assert (used.types, used.ranks, used.residual_types) == (("f32", "f32"), (0, 0), ("", ""))
    assert slimrt.plan(tiny, cache="kv:q8").asked.types == ("q8", "q8")
    with pytest.raises(slimrt.UnsupportedError, match="cache mode 'kk'"):
        slimrt.Model(tiny, cache=CacheConfig("kk"))
