# SPDX-License-Identifier: Apache-2.0
"""slimrt convert --kv-layers, --kv-heads: what is merged, how much wider networks become, what that costs and saves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import no_cache
import slimrt
from conftest import GOLDEN, decode, open_engine, relative, values_of
from gguf_shapes import Shape, write_random, write_sparse
from no_cache import mlkv
from reference_files import hf_tensors
from slimrt.converter.share import share
from slimrt.modelfile.gguf import ModelData, read_gguf

IDS = np.random.default_rng(3).integers(3, 60, 40)
L, H, D = 6, 4, 32  # of no_cache.NEOX


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A GPT-NeoX whose layers and heads all have K and V, as a directory."""
    config = mlkv(L, H)
    return no_cache.write(tmp_path_factory.mktemp("share") / "source", config, no_cache.tensors_of(config))


def merged_by_hand(owners: int, heads: int, shares: list[list[float]]) -> dict[str, np.ndarray]:
    """The tensors of `source` with means of neighbouring heads, and groups of layers in these shares."""
    tensors = {name: value.astype(np.float64) for name, value in no_cache.tensors_of(mlkv(L, H)).items()}
    reads = no_cache.owners_of(mlkv(owners, heads))
    out = {name: value for name, value in tensors.items() if ".key." not in name and ".value." not in name}
    for owner, weights in zip(sorted(set(reads)), shares, strict=True):
        group = [layer for layer in range(L) if reads[layer] == owner]
        for part in ("key.weight", "key.bias", "value.weight", "value.bias"):
            name = "gpt_neox.layers.{}.attention." + part
            rows = sum(w * tensors[name.format(i)] for w, i in zip(weights, group, strict=True))
            by_head = rows.reshape(heads, H // heads, D // H, -1).mean(axis=1)
            out[name.format(owner)] = by_head.reshape(heads * D // H, *rows.shape[1:])
    return out


@pytest.mark.parametrize(
    ("owners", "heads", "merge", "shares"),
    [
        (6, 4, "uniform", [[1]] * 6),
        (6, 2, "uniform", [[1]] * 6),
        (6, 1, "uniform", [[1]] * 6),
        (2, 4, "uniform", [[1 / 3] * 3] * 2),
        (2, 2, "uniform", [[1 / 3] * 3] * 2),
        (4, 1, "uniform", [[1], [1 / 2] * 2, [1], [1 / 2] * 2]),
    ],
)
def test_the_model_is_the_merged_one(owners, heads, merge, shares, source, tmp_path):
    """Against the forward pass without a cache of weights merged by hand, in the old width: new units add nothing."""
    slimrt.convert(source, tmp_path / "out.gguf", kv_layers=owners, kv_heads=heads, merge=merge, progress=False)
    exact = no_cache.logits(mlkv(owners, heads), merged_by_hand(owners, heads, shares), IDS)
    assert relative(decode(open_engine(tmp_path / "out.gguf", n_ctx=64), IDS, 30), exact) <= 1e-5


def test_readers_of_rotated_keys(tmp_path):
    """As CLA's: against its forward pass without a cache, of keys and values merged by hand."""
    config = no_cache.cla(1)
    tensors = no_cache.tensors_of(config)
    directory = no_cache.write(tmp_path / "source", config, tensors)
    slimrt.convert(directory, tmp_path / "out.gguf", kv_layers=3, shared_keys="rotated", progress=False)
    for i in range(0, L, 2):
        for part in ("k", "v"):
            name = "model.layers.{}.self_attn." + part + "_proj.weight"
            tensors[name.format(i)] = (tensors[name.format(i)].astype(np.float64) + tensors[name.format(i + 1)]) / 2
    exact = no_cache.logits(no_cache.cla(2), tensors, IDS)
    assert relative(decode(open_engine(tmp_path / "out.gguf", n_ctx=64), IDS, 30), exact) <= 1e-5


def test_the_published_converters_shares_and_copies(source, tmp_path):
    slimrt.convert(source, tmp_path / "out.gguf", kv_layers=2, kv_heads=1, merge="reference", progress=False)
    made, wanted = values_of(tmp_path / "out.gguf"), merged_by_hand(2, 1, [[1 / 4, 1 / 4, 1 / 2]] * 2)
    for ours, theirs in {
        "attn_k.weight": "key.weight",
        "attn_k.bias": "key.bias",
        "attn_v.weight": "value.weight",
    }.items():
        assert relative(made[f"blk.3.{ours}"], wanted[f"gpt_neox.layers.3.attention.{theirs}"]) <= 1e-6
    before = {name: w.astype(np.float32) for name, w in hf_tensors(source).items()}
    up, down = (before[f"gpt_neox.layers.1.mlp.dense_{part}.weight"] for part in ("h_to_4h", "4h_to_h"))
    added = len(made["blk.1.ffn_up.weight"]) - len(up)
    # 24 heads become 2: 22 * (2 * 32 * 8 + 2 * 8) parameters over 6 layers, in rows of 32, half of them in each matrix
    assert added == round(22 * 528 // 6 / 32) // 2 == 30
    assert np.array_equal(made["blk.1.ffn_up.weight"], np.concatenate([up, up[:added]]))
    assert np.array_equal(made["blk.1.ffn_down.weight"], np.concatenate([down, down[:, :added]], axis=1))


def test_nothing_shared_is_the_source_to_the_bit(convert, tmp_path):
    """m = l, g = h: of fused projections, as Pythia has them."""
    plain = convert(GOLDEN / "gptneox")
    slimrt.convert(plain, tmp_path / "same.gguf", kv_layers=2, kv_heads=4, progress=False)
    before, after = values_of(plain), values_of(tmp_path / "same.gguf")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    assert np.array_equal(*(decode(open_engine(path, n_ctx=64), IDS, 30) for path in (plain, tmp_path / "same.gguf")))
    report = slimrt.convert(plain, tmp_path / "same.gguf", kv_heads=4, progress=False)
    assert report.warnings == []


def test_fused_projections_come_apart(convert, tmp_path):
    """The layout alone changes nothing: the heads of one layer are kept, those of the other are merged with them."""
    plain = convert(GOLDEN / "gptneox")
    slimrt.convert(plain, tmp_path / "out.gguf", kv_layers=1, progress=False)
    before, after = values_of(plain), values_of(tmp_path / "out.gguf")
    assert not [name for name in after if "attn_qkv" in name]
    q, k, v = (np.split(np.stack([before[f"blk.{i}.attn_qkv.{kind}"] for i in (0, 1)]), 3, axis=1)
               for kind in ("weight", "bias", "weight"))  # fmt: skip
    assert np.array_equal(after["blk.1.attn_q.weight"], q[0][1])
    assert relative(after["blk.0.attn_k.bias"], k[1].mean(axis=0)) < 1e-6
    assert relative(after["blk.0.attn_v.weight"], v[2].mean(axis=0)) < 1e-6


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k"])
def test_types_stay_as_far_as_their_blocks_fit(kind, tmp_path):
    """And a gated network has three matrices to put the lost parameters into."""
    shape = Shape(d=256, n_layers=3, n_heads=4, n_ctx=64, d_ff=256)
    slimrt.convert(write_random(tmp_path / "plain.gguf", shape), tmp_path / "source.gguf", outtype=kind, progress=False)
    report = slimrt.convert(tmp_path / "source.gguf", tmp_path / "out.gguf", kv_layers=1, kv_heads=2, progress=False)
    tensors = read_gguf(tmp_path / "out.gguf").tensors
    added = round(10 * 2 * 64 * 256 // 3 / 256) // 3
    assert tensors["blk.2.ffn_gate.weight"].shape == tensors["blk.2.ffn_up.weight"].shape == (256 + added, 256)
    assert tensors["blk.0.attn_k.weight"].type.name.lower() == tensors["blk.2.ffn_up.weight"].type.name.lower() == kind
    assert tensors["blk.0.attn_k.weight"].shape == (128, 256) and "blk.1.attn_k.weight" not in tensors
    assert tensors["blk.0.ffn_down.weight"].type.name == "F16"
    assert sum("ffn_down" in warning for warning in report.warnings) == (0 if kind == "f16" else 3)
    got, wanted = (decode(open_engine(tmp_path / name, n_ctx=64), IDS, 30) for name in ("out.gguf", "source.gguf"))
    assert got.shape == wanted.shape and np.isfinite(got).all()


# ---------------------------------------------------------------- Pythia-160M, as published (docs/cache-math.md)
PYTHIA = Shape(d=768, n_layers=12, n_heads=12, n_ctx=2048, d_ff=3072, n_vocab=50304, arch="gptneox")
PUBLISHED = {  # variant -> layers and heads with K and V, units of a feed-forward network, parameters
    "GQA-48": (12, 4, 3584, 162_316_800),
    "MLKV-48": (4, 12, 3584, 162_316_800),
    "MQA-12": (12, 1, 3777, 162_332_940),
    "MLKV-12": (4, 3, 3777, 162_332_940),
    "MLKV-6": (6, 1, 3809, 162_332_556),
    "MLKV-4": (4, 1, 3819, 162_320_132),
    "MLKV-2": (2, 1, 3830, 162_326_152),
    "MLKV-1": (1, 1, 3835, 162_319_940),
}


def parameters(model: ModelData) -> int:
    return sum(int(np.prod(tensor.shape)) for tensor in model.tensors.values())


@pytest.fixture(scope="session")
def pythia(tmp_path_factory) -> ModelData:
    """Of its shape, without data."""
    return read_gguf(write_sparse(tmp_path_factory.mktemp("pythia") / "160m.gguf", PYTHIA))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_published_models(name, pythia):
    m, g, units, total = PUBLISHED[name]
    model, _ = share(pythia, m, g)
    assert model.size("feed_forward_length") == units and model.tensors["blk.11.ffn_up.weight"].shape == (units, 768)
    # Of heads gone and of units new: 768 weights in and out and a bias in, in 12 layers.
    lost, gained = (144 - m * g) * 64 * 2 * 769, 12 * (units - 3072) * (2 * 768 + 1)
    assert parameters(model) == parameters(pythia) - lost + gained == total - 50304 * 768  # without an output matrix
    assert abs(total / 162_322_944 - 1) < 1e-3


def test_parameters_of_pythia_itself(pythia):
    """162 322 944 with an output matrix, which this shape leaves out: 12 layers of 7 087 872, a norm, an embedding."""
    assert parameters(share(pythia, 12, 12)[0]) == parameters(pythia) == 162_322_944 - 50304 * 768
    assert parameters(pythia) == 12 * 7_087_872 + 2 * 768 + 50304 * 768


# ---------------------------------------------------------------- MLKV, table 1
@pytest.mark.unsanitized  # a minute each there; plans of other shapes run the same code
@pytest.mark.unemulated  # and there
@pytest.mark.parametrize(("m", "g", "gib"), [(96, 96, 144), (96, 24, 36), (96, 1, 1.5), (24, 1, 0.375)])
def test_cache_of_175_billion_parameters(m, g, gib, tmp_path):
    """96 layers of 96 heads of 128; its sizes are those of 32768 tokens."""
    shape = Shape(d=64, n_layers=96, n_heads=96, n_kv_heads=g, head_dim=128, n_ctx=32768)
    owners = [layer - layer % (96 // m) for layer in range(96)]
    path = write_sparse(tmp_path / "175b.gguf", shape, {"slimrt.cache.owners": owners})
    planned = slimrt.plan(path, cache="kv:f16", n_ctx=32768).asked
    assert planned.cache_bytes == gib * 2**30 == 2 * 32768 * m * g * 128 * 2


# ---------------------------------------------------------------- what is said, what is refused
def test_a_merged_model_says_that_it_is_of_no_use_yet(source, tmp_path, run):
    report = slimrt.convert(source, tmp_path / "out.gguf", kv_layers=3, kv_heads=2, progress=False)
    assert "not usable before it is trained further" in report.warnings[-1]
    code, out, err = run("convert", source, "-o", tmp_path / "cli.gguf", "--kv-layers", 3, "--kv-heads", 2)
    assert code == 0 and "warning: layers and heads share K and V now and were not trained to" in out
    assert (tmp_path / "cli.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()
    code, out, err = run("plan", tmp_path / "cli.gguf", "--cache", "kv:f16")
    assert code == 0
    slimrt.convert(tmp_path / "out.gguf", tmp_path / "again.gguf", cache="kv", progress=False)
    assert read_gguf(tmp_path / "again.gguf").value("slimrt.sharing.not_uptrained") is True


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"kv_layers": 7}, ValueError, "kv_layers must be from 1 to 6"),
        ({"kv_layers": -1}, ValueError, "kv_layers must be from 1 to 6"),
        ({"kv_layers": 0}, ValueError, "kv_layers must be from 1 to 6"),
        ({"kv_heads": 3}, ValueError, "kv_heads must divide 4"),
        ({"kv_heads": 0}, ValueError, "kv_heads must divide 4"),
        ({"kv_heads": 8}, ValueError, "kv_heads must divide 4"),
        ({"kv_heads": 2, "merge": "sum"}, ValueError, "unknown merge 'sum'; there are: uniform, reference"),
        ({"merge": "reference"}, ValueError, "for a conversion with kv_layers or kv_heads"),
        ({"shared_keys": "rotated"}, ValueError, "for a conversion with kv_layers or kv_heads"),
        (
            {"kv_layers": 2, "shared_keys": "raw"},
            ValueError,
            "unknown shared keys 'raw'; there are: unrotated, rotated",
        ),
        ({"kv_heads": 2, "cache": "k+r"}, ValueError, "fold for a cache after that"),
    ],
)
def test_what_cannot_be_merged(options, error, said, source, tmp_path):
    with pytest.raises(error, match=said):
        slimrt.convert(source, tmp_path / "out.gguf", progress=False, **options)
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_merged(convert, source, tmp_path):
    with pytest.raises(slimrt.UnsupportedError, match="gptneox and llama, not for 'gpt2'"):
        slimrt.convert(convert(GOLDEN / "gpt2_tanh"), tmp_path / "out.gguf", kv_heads=1, progress=False)
    with pytest.raises(slimrt.UnsupportedError, match="which are experts here"):
        slimrt.convert(convert(GOLDEN / "mixtral"), tmp_path / "out.gguf", kv_heads=1, progress=False)
    slimrt.convert(source, tmp_path / "shared.gguf", kv_layers=2, progress=False)
    with pytest.raises(slimrt.UnsupportedError, match="share K and V already"):
        slimrt.convert(tmp_path / "shared.gguf", tmp_path / "out.gguf", kv_heads=1, progress=False)


def test_a_conversion_that_is_killed_leaves_no_model(source, tmp_path):
    """What it leaves under another name goes with the next conversion."""
    slow = "import gguf, sys, time, slimrt; w = gguf.GGUFWriter.write_tensor_data\n"
    slow += "gguf.GGUFWriter.write_tensor_data = lambda s, t: (print('writing', flush=True), time.sleep(9), w(s, t))\n"
    slow += "slimrt.convert(sys.argv[1], sys.argv[2], kv_layers=2, kv_heads=1, progress=False)"
    out = tmp_path / "out.gguf"
    with subprocess.Popen([sys.executable, "-c", slow, source, out], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    left = [Path(path).name for path in tmp_path.iterdir()]
    assert left and not out.exists() and all(name.startswith(".out.gguf.") for name in left)
    slimrt.convert(source, out, kv_layers=2, kv_heads=1, progress=False)
    assert list(tmp_path.iterdir()) == [out]
