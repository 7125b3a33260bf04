# SPDX-License-Identifier: Apache-2.0
"""MLKV and CLA: checkpoints whose layers share K and V, against their forward pass without a cache in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import no_cache
import slimrt
from conftest import decode, open_engine, relative, rms
from gguf_shapes import Shape, write_random
from no_cache import cla, mlkv
from slimrt import _core
from slimrt.cache.config import CacheChoice
from slimrt.cache.unfolded import folds_at_load
from slimrt.errors import CacheUnsupportedError, ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import read_gguf, string, write_gguf
from slimrt.modelfile.sharing import KEYS, OWNERS, SHARING, spread_owners
from slimrt.modelfile.source import ModelSource

IDS = np.random.default_rng(3).integers(3, 60, 60)
N_PREFILL = 40
CONFIGS = {
    "mlkv-6-4": mlkv(6, 4),  # every layer and head its own: the layout alone
    "mlkv-3-4": mlkv(3, 4),
    "mlkv-4-2": mlkv(4, 2),  # 4 does not divide 6: layers 0, 1, 3 and 4 own
    "mlkv-2-1": mlkv(2, 1, use_parallel_residual=False),
    "mlkv-1-1": mlkv(1, 1),
    "mlkv-all-rotated": mlkv(2, 2, rotary_pct=1.0),
    "cla-2": cla(2),
    "cla-4": cla(4, num_key_value_heads=4),  # 4 does not divide 6
}


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name) -> (config, tensors, the converted file), made once a session."""
    folder = tmp_path_factory.mktemp("sharing")

    @cache
    def made(name: str):
        config = CONFIGS[name]
        tensors = no_cache.tensors_of(config)
        directory = no_cache.write(folder / name, config, tensors)
        slimrt.convert(directory, folder / f"{name}.gguf", progress=False)
        return config, tensors, folder / f"{name}.gguf"

    return made


@cache
def exact(name: str) -> np.ndarray:
    return no_cache.logits(CONFIGS[name], no_cache.tensors_of(CONFIGS[name]), IDS)


@pytest.mark.parametrize("n_batch", [512, 7])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_is_the_forward_pass_without_a_cache(name, n_batch, shared):
    _, _, path = shared(name)
    got = decode(open_engine(path, n_ctx=64, n_batch=n_batch), IDS, N_PREFILL)
    assert relative(got, exact(name)) <= 1e-5


def through_steps(path, n_prefill: int = N_PREFILL, **options) -> np.ndarray:
    """Logits of a prompt, then of a token at a time."""
    with slimrt.Model(path, cache_type="f32", n_ctx=64, calibration="none", **options) as model:
        session = model.session()
        parts = [IDS[:n_prefill].tolist(), *([int(token)] for token in IDS[n_prefill:])]
        return np.concatenate([session.append(part) for part in parts])


def full_rank(config: dict) -> dict:
    """At the width of V the residual holds all that K does not predict: k+r is exact."""
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    return {"rank": width, "residual_type": "f32"}


def amplified(config: dict, tensors: dict) -> float:
    """What mode k's inverse may make of float32's rounding, over what is allowed without it."""
    return max(np.linalg.cond(w) for name, w in tensors.items() if name.endswith(("key.weight", "k_proj.weight")))


SLIM = [("mlkv-3-4", "k"), ("cla-4", "k"), ("mlkv-3-4", "k+r"), ("mlkv-2-1", "k+r"), ("cla-2", "k+r")]
SLIM += [("mlkv-3-4", "lowrank"), ("mlkv-2-1", "lowrank"), ("cla-2", "lowrank")]


@pytest.mark.parametrize(("converted", "n_prefill", "n_batch"), [(True, 40, 512), (False, 40, 16), (False, 3, 512)])
@pytest.mark.parametrize(("name", "mode"), SLIM)
def test_slim_rows_of_an_owner_serve_its_readers(name, mode, converted, n_prefill, n_batch, shared, tmp_path):
    """Folded at load and by a conversion, of owners only."""
    config, tensors, path = shared(name)
    residual = full_rank(config) if mode == "k+r" else {}
    if converted:
        plain, path = path, tmp_path / "folded.gguf"
        slimrt.convert(plain, path, cache=mode, cache_type="f32", calibration="none", progress=False, **residual)
        owners = set(no_cache.owners_of(config))
        made = read_gguf(path).tensors.keys() - read_gguf(plain).tensors.keys()
        folded = {int(name.split(".")[1]) for name in made if name.startswith("blk.")}
        assert folded == owners
        source = ModelSource(path)
        assert not folds_at_load(source, CacheChoice.of(f"{mode}:f32").layers(source))
    got = through_steps(path, n_prefill, n_batch=n_batch, **({} if converted else {"cache": mode} | residual))
    allowed = 1e-6 * amplified(config, tensors) if mode == "k" else 1e-5
    assert relative(got, exact(name)) <= allowed


def test_a_chosen_cache_is_that_of_the_owner(shared, tmp_path):
    report = slimrt.convert(
        shared("mlkv-2-1")[2],
        tmp_path / "auto.gguf",
        cache="auto",
        cache_type="f16",
        calibration="none",
        progress=False,
    )
    owners = no_cache.owners_of(CONFIGS["mlkv-2-1"])
    assert [layer.mode for layer in report.layers] == [report.layers[owner].mode for owner in owners]
    assert [layer.layer for layer in report.layers if layer.bytes_per_token] == sorted(set(owners))
    assert f"total: {sum(layer.bytes_per_token for layer in report.layers)} bytes a token" in report.table()
    assert relative(through_steps(tmp_path / "auto.gguf"), exact("mlkv-2-1")) < 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_bytes(name, shared):
    """2 b s m g d_k elements, planned and allocated (MLKV, section 3)."""
    config, _, path = shared(name)
    d_k, g = config["hidden_size"] // config["num_attention_heads"], config["num_key_value_heads"]
    m = len(set(no_cache.owners_of(config)))
    b, s = 3, 64
    options = {"cache": "kv", "cache_type_k": "f16", "cache_type_v": "f16", "n_ctx": s, "n_seqs": b}
    planned = _core.plan(str(path), **options)
    allocated = _core.Engine(str(path), **options).memory()
    assert planned["cache"] == allocated["cache"] == 2 * b * s * m * g * d_k * 2
    assert planned["total"] == allocated["total"]
    assert slimrt.plan(path, cache="kv:f16", n_ctx=s, n_seqs=b).asked.cache_bytes == planned["cache"]


@pytest.mark.parametrize(("dtype", "allowed"), [("f16", 1e-3), ("q8", 0.02), ("fp8_e4m3", 0.1)])
def test_unrotated_rows_of_fewer_bits(dtype, allowed, shared):
    """Keys are rotated as they are read back; rows that nobody may skip are read."""
    wanted = exact("mlkv-3-4")
    for sparse_threshold in (0.0, 1e-6):
        engine = open_engine(shared("mlkv-3-4")[2], dtype=dtype, n_ctx=64, sparse_threshold=sparse_threshold)
        assert 0 < rms(decode(engine, IDS, 3) - wanted) <= allowed * rms(wanted)


def test_sequences_side_by_side(shared):
    """A fork goes on as its twin, and sequences of other lengths do not disturb each other."""
    path = shared("mlkv-3-4")[2]
    ids = IDS.astype(np.int32)
    engine = open_engine(path, n_ctx=64, n_seqs=3)
    first, second = engine.new_sequence(), engine.new_sequence()
    engine.append([(first, ids[:40]), (second, ids[20:33])])
    fork = engine.fork(first)
    together = engine.append([(second, ids[33:34]), (fork, ids[40:45]), (first, ids[40:41])], all_logits=True)
    wanted = exact("mlkv-3-4")
    assert relative(together[1:6], wanted[40:45]) <= 1e-5 and relative(together[6], wanted[40]) <= 1e-5
    engine.truncate(fork, 33)
    assert relative(engine.append([(fork, ids[33:45])], all_logits=True), wanted[33:45]) <= 1e-5


# ---------------------------------------------------------------- who reads whom
def test_owners_of_each_family():
    assert spread_owners(12, 4) == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert spread_owners(6, 4) == [0, 1, 1, 3, 4, 4]
    assert spread_owners(3, 3) == [0, 1, 2] and spread_owners(5, 1) == [0] * 5
    assert spread_owners(30, 22)[14] == 14  # as published: in floats 11 * (30 / 22) is a little less than 15
    assert SHARING["cla"].owners({"num_hidden_layers": 5, "cla_share_factor": 2}) == [0, 0, 2, 2, 4]
    types = ["sliding", "full", "sliding", "full", "sliding", "sliding", "full"]
    gemma = {"num_hidden_layers": 7, "num_kv_shared_layers": 3, "layer_types": types}
    assert SHARING["gemma3n"].owners(gemma) == [0, 1, 2, 3, 2, 2, 3]
    assert SHARING["gemma3n"].owners(gemma | {"num_kv_shared_layers": 0}) == list(range(7))
    with pytest.raises(ValueError, match="no layer of type 'full'"):
        SHARING["gemma3n"].owners(gemma | {"num_kv_shared_layers": 6})


def test_what_the_file_says(shared):
    said = {name: read_gguf(shared(name)[2]) for name in ("mlkv-6-4", "mlkv-4-2", "cla-2")}
    assert OWNERS not in said["mlkv-6-4"].metadata
    assert said["mlkv-4-2"].value(OWNERS) == [0, 1, 1, 3, 4, 4] and said["mlkv-4-2"].value(KEYS) == "unrotated"
    assert said["cla-2"].value(OWNERS) == [0, 0, 2, 2, 4, 4] and said["cla-2"].value(KEYS) == "raw"


def test_the_stage_matters(shared, tmp_path):
    """MLKV's readers never rotate keys: with rotated ones it is another model."""
    model = read_gguf(shared("mlkv-3-4")[2])
    write_gguf(tmp_path / "rotated.gguf", model.with_metadata({KEYS: string("rotated")}), show_progress=False)
    got = decode(open_engine(tmp_path / "rotated.gguf", n_ctx=64), IDS, N_PREFILL)
    assert relative(got, exact("mlkv-3-4")) > 0.01


# ---------------------------------------------------------------- what is refused, by name
@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        (mlkv(3, 2, use_key_value_mlp=True), UnsupportedError, "use_key_value_mlp = True"),
        (mlkv(3, 3), ModelFormatError, "4 query heads and 3 key heads"),
        (mlkv(3, 2, num_key_value_layers=7), ModelFormatError, "7 layers with K and V of their own.* 6 layers"),
        (mlkv(3, 2, num_key_value_layers=0), ModelFormatError, "num_key_value_layers is 0"),
        (mlkv(3, 2, num_key_value_layers="3"), ModelFormatError, "num_key_value_layers is '3'"),
        (cla(2, cla_share_factor=None), ModelFormatError, "cla_share_factor is None"),
        (cla(2, model_type="olmo2"), UnsupportedError, "use_cla = True"),
        (cla(2, model_type="phi3"), UnsupportedError, "use_cla = True"),
        (mlkv(2, 2), ModelFormatError, "layers.3.attention.key.weight' is missing"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read(config, error, said, tmp_path):
    directory = no_cache.write(tmp_path / "model", config, no_cache.tensors_of(mlkv(3, 2)))
    with pytest.raises((error, UnsupportedError), match=said):
        slimrt.convert(directory, tmp_path / "out.gguf", progress=False)
    assert not (tmp_path / "out.gguf").exists()


def test_a_mode_that_rotates_keys_for_all_is_refused(shared, tmp_path):
    path, said = shared("mlkv-3-4")[2], "layers read its keys before RoPE"
    with pytest.raises(CacheUnsupportedError, match=f"layer 0: other {said}.*Modes that work here: kv, k, k\\+r"):
        _core.Engine(str(path), n_ctx=64, cache="kivi")
    with pytest.raises(CacheUnsupportedError, match=said):
        slimrt.convert(path, tmp_path / "out.gguf", cache="xr", progress=False)
    refused = {mode["name"]: mode["refusal"] for mode in _core.modes(str(path))}
    assert said in refused["xr"] and refused["kv"] == refused["k"] == ""
    assert _core.modes(str(shared("cla-2")[2]))[0]["refusal"] == ""


@pytest.mark.parametrize(
    ("arch", "stage", "error", "said"),
    [
        ("llama", "cold", ModelFormatError, "'slimrt.cache.shared_keys' is 'cold'; it may be: rotated, raw, unrotated"),
        ("olmo2", "raw", UnsupportedError, "each layer norms keys by itself"),
    ],
)
def test_stages_that_cannot_be_read(arch, stage, error, said, tmp_path):
    shape = Shape(d=32, n_layers=2, n_heads=4, n_ctx=64, arch=arch)
    path = write_random(tmp_path / "model.gguf", shape, {OWNERS: [0, 0], KEYS: stage})
    with pytest.raises(error, match=said):
        open_engine(path, n_ctx=64)
