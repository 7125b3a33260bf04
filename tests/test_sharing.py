# SPDX-License-Identifier: Apache-2.0
"""MLKV and CLA: checkpoints whose layers share K and V, against their forward pass without a cache in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import no_cache
import slimrt
from conftest import decode, open_engine, relative
from gguf_shapes import Shape, write_random
from no_cache import cla, mlkv
from slimrt import _core
from slimrt.errors import CacheUnsupportedError, ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import read_gguf
from slimrt.modelfile.sharing import KEYS, OWNERS, SHARING, spread_owners

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


@pytest.mark.parametrize(("name", "mode"), [("mlkv-3-4", "k"), ("mlkv-3-4", "k+r"), ("mlkv-2-1", "k+r"),
                                            ("cla-2", "k+r"), ("cla-4", "k")])  # fmt: skip
@pytest.mark.parametrize("n_prefill", [N_PREFILL, 3])
def test_slim_rows_of_an_owner_serve_its_readers(name, mode, n_prefill, shared):
    """Folded at load, of owners only. At full rank k+r is exact; W_K's condition is what the tolerance allows for."""
    config, _, path = shared(name)
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    rank = {"rank": width, "residual_type": "f32"} if mode == "k+r" else {}
    with slimrt.Model(path, cache=mode, cache_type="f32", n_ctx=64, calibration="none", **rank) as model:
        with model.session() as session:
            got = [session.append(IDS[:n_prefill].tolist(), all_logits=True)]
            got += [session.append([int(token)], all_logits=True) for token in IDS[n_prefill:]]
    assert relative(np.concatenate(got), exact(name)) <= 1e-4
