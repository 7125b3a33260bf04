# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA): files of both layouts, layers that do not run, many heads, what a token takes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slimrt
from conftest import CUDA_MISSING, GOLDEN, decode, open_engine, relative, values_of
from gguf_shapes import finish, finish_sparse
from reference import Reference
from slimrt import _core
from slimrt.modelfile.gguf import ModelData, Tensor, array, float32, read_gguf, string, uint32, write_gguf
from slimrt.modelfile.hf.directory import read_hf
from test_cuda import bound

IDS = np.random.default_rng(3).integers(3, 100, 60)
SIZES = {"n_heads": 4, "plain": 12, "rotating": 8, "v": 10, "latent": 20}  # of the tiny models


def with_tensors(path, target, tensors, metadata=None, without=()):
    """A file with other tensors, values by name, and keys; None: without that key."""
    model = read_gguf(path)
    kept = {name: tensor for name, tensor in model.tensors.items() if name not in without}
    made = {name: Tensor.of(name, values) for name, values in tensors.items()}
    fields = {key: value for key, value in model.metadata.items() if (metadata or {}).get(key, 0) is not None}
    fields |= {key: value for key, value in (metadata or {}).items() if value is not None}
    write_gguf(target, type(model)(fields, kept | made), show_progress=False)
    return target


def in_old_layout(path, target):
    """K's and V's weights of the latent in one tensor, keys of heads in place of rows."""
    values, tensors, without = values_of(path), {}, []
    for name, k in values.items():
        if not name.endswith("attn_k_b.weight"):
            continue
        both = np.concatenate([k.swapaxes(1, 2), values[name.replace("_k_b", "_v_b")]], axis=1)
        tensors[name.replace("_k_b", "_kv_b")] = both.reshape(-1, SIZES["latent"])
        without += [name, name.replace("_k_b", "_v_b")]
    keys = {
        "deepseek2.attention.key_length": uint32(SIZES["plain"] + SIZES["rotating"]),
        "deepseek2.attention.value_length": uint32(SIZES["v"]),
        "deepseek2.attention.head_count_kv": uint32(SIZES["n_heads"]),
        "deepseek2.attention.key_length_mla": None,
        "deepseek2.attention.value_length_mla": None,
    }
    return with_tensors(path, target, tensors, keys, without)


@pytest.mark.parametrize("name", ["deepseek2", "deepseek2_yarn"])
def test_files_of_the_old_layout(name, convert, tmp_path):
    """As llama.cpp wrote them before it absorbed weights."""
    path = convert(GOLDEN / name)
    old = in_old_layout(path, tmp_path / "old.gguf")
    logits = [decode(open_engine(file, "latent", "f16", n_ctx=64, n_batch=24), IDS, 40) for file in (path, old)]
    assert relative(*logits) < 1e-5
    assert relative(Reference(old).logits(IDS), Reference(path).logits(IDS)) < 1e-12


def test_queries_that_grow(convert, tmp_path):
    """All columns of them, in a file of DeepSeek-V2's architecture too (Mistral Large 3's); where files of Mistral 4 do
    not say it, as llama.cpp's converter writes them, by what is published."""
    path, key = convert(GOLDEN / "mistral4"), "mistral4.attention.temperature_scale"
    model = read_gguf(path)
    renamed = {re.sub(r"^mistral4\.", "deepseek2.", name): value for name, value in model.metadata.items()}
    other, published, bare = (tmp_path / f"{name}.gguf" for name in ("other", "published", "bare"))
    write_gguf(
        other, ModelData(renamed | {"general.architecture": string("deepseek2")}, model.tensors), show_progress=False
    )
    with_tensors(path, published, {}, {key: float32(0.1)})
    with_tensors(path, bare, {}, {key: None, "mistral4.attention.temperature_length": None})
    logits = [decode(open_engine(file, "latent", "f32", n_ctx=64), IDS, 40) for file in (path, other, published, bare)]
    assert relative(logits[0], Reference(path).logits(IDS)) < 1e-5
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[2], logits[3])
    assert relative(logits[0], logits[2]) > 1e-3


def test_the_older_spelling_of_mistral_4_s_rope(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "mistral4", tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    config["rope_scaling"] = config.pop("rope_parameters")
    (directory / "config.json").write_text(json.dumps(config))
    old, new = (read_hf(path)[0].metadata for path in (directory, GOLDEN / "mistral4"))
    assert {key: value for key, value in old.items() if key != "general.name"} == {
        key: value for key, value in new.items() if key != "general.name"
    }


def test_scales_that_minicpm3_files_leave_out(convert, tmp_path):
    keys = [f"minicpm3.{key}" for key in ("embedding_scale", "residual_scale", "logit_scale")]
    path = convert(GOLDEN / "minicpm3")
    assert all(key in read_gguf(path).metadata for key in keys)
    bare = with_tensors(path, tmp_path / "bare.gguf", {}, dict.fromkeys(keys))
    logits = [decode(open_engine(file, "latent", "f32", n_ctx=64), IDS, 40) for file in (path, bare)]
    assert relative(*logits) < 1e-6


# ---------------------------------------------------------------- layers for tokens after the next
def test_layers_for_further_tokens_do_not_run(convert, tmp_path):
    """Those that the file names, and no others."""
    path = convert(GOLDEN / "deepseek3")
    more = {"blk.3.nextn.eh_proj.weight": np.ones((48, 96), np.float32), "blk.3.attn_norm.weight": np.ones(48)}
    count = {"deepseek2.block_count": uint32(4), "deepseek2.nextn_predict_layers": uint32(1)}
    longer = with_tensors(path, tmp_path / "longer.gguf", more, count)
    logits = [decode(open_engine(file, "latent", "f32", n_ctx=64), IDS, 40) for file in (path, longer)]
    assert np.array_equal(*logits)
    beyond = {**more, "blk.4.attn_norm.weight": np.ones(48)}
    with pytest.raises(slimrt.UnsupportedError, match="blk.4.attn_norm"):
        _core.Engine(str(with_tensors(path, tmp_path / "beyond.gguf", beyond, count)))
    with pytest.raises(slimrt.UnsupportedError, match="blk.3."):
        _core.Engine(str(with_tensors(path, tmp_path / "unnamed.gguf", more)))
    with pytest.raises(slimrt.ModelFormatError, match="nextn_predict_layers"):
        all_of_them = {"deepseek2.nextn_predict_layers": uint32(3)}
        _core.Engine(str(with_tensors(path, tmp_path / "none.gguf", {}, all_of_them)))


def test_directories_with_layers_for_further_tokens(convert, tmp_path):
    """As many as config.json says are left out."""
    directory = shutil.copytree(GOLDEN / "deepseek3", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": np.ones((48, 96), np.float32)}
    save_file(tensors | more, directory / "model.safetensors")
    slimrt.convert(directory, tmp_path / "out.gguf", progress=False)
    ours, wanted = values_of(tmp_path / "out.gguf"), values_of(convert(GOLDEN / "deepseek3"))
    assert ours.keys() == wanted.keys()
    save_file(
        tensors | {"model.layers.4.eh_proj.weight": np.ones((48, 96), np.float32)}, directory / "model.safetensors"
    )
    with pytest.raises(slimrt.UnsupportedError, match="model.layers.4"):
        slimrt.convert(directory, tmp_path / "more.gguf", progress=False)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek2", {"attention_bias": True}, "attention_bias"),
        ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek2", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek2_yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        ("deepseek3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek3", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ("minicpm3", {"num_key_value_heads": 1}, "num_key_value_heads"),
    ],
)
def test_configs_that_mean_something_else_are_refused(name, changes, words, tmp_path):
    directory = shutil.copytree(GOLDEN / name, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(slimrt.UnsupportedError, match=words):
        slimrt.convert(directory, tmp_path / "out.gguf", progress=False)


# ---------------------------------------------------------------- sizes
def write(
    path, *, n_heads, d=48, plain=16, rotating=16, v=16, latent=32, n_layers=1, sparse=False, q_latent=0, changes=None
):
    """A model without experts of any shape. sparse: its data is a hole."""
    writer, random = gguf.GGUFWriter(path, "deepseek2"), np.random.default_rng(0)
    row = latent + rotating
    sizes = {
        "context_length": 4096, "embedding_length": d, "block_count": n_layers, "feed_forward_length": 64,
        "attention.head_count": n_heads, "attention.head_count_kv": 1, "attention.kv_lora_rank": latent,
        "attention.key_length": row, "attention.value_length": latent, "rope.dimension_count": rotating,
        "attention.key_length_mla": plain + rotating, "attention.value_length_mla": v,
    }  # fmt: skip
    if q_latent:
        sizes["attention.q_lora_rank"] = q_latent
    for key, value in (sizes | (changes or {})).items():
        if value is not None:
            writer.add_uint32(f"deepseek2.{key}", value)
    writer.add_float32("deepseek2.attention.layer_norm_rms_epsilon", 1e-6)
    q = n_heads * (plain + rotating)
    layer = {
        "attn_norm": (d,), "attn_kv_a_mqa": (row, d), "attn_kv_a_norm": (latent,), "attn_k_b": (n_heads, latent, plain),
        "attn_v_b": (n_heads, v, latent), "attn_output": (d, n_heads * v), "ffn_norm": (d,), "ffn_gate": (64, d),
        "ffn_up": (64, d), "ffn_down": (d, 64),
    }  # fmt: skip
    of_q = {"attn_q_a": (q_latent, d), "attn_q_a_norm": (q_latent,), "attn_q_b": (q, q_latent)}
    layer |= of_q if q_latent else {"attn_q": (q, d)}
    shapes = {"token_embd": (128, d), "output_norm": (d,)}
    shapes |= {f"blk.{i}.{name}": dims for i in range(n_layers) for name, dims in layer.items()}
    for name, dims in shapes.items():
        if sparse:
            writer.add_tensor_info(f"{name}.weight", dims, np.dtype(np.float32), 4 * int(np.prod(dims)))
        else:
            values = 0.2 * random.normal(size=dims) + ("norm" in name)
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    return (finish_sparse if sparse else finish)(writer, path)


@pytest.mark.parametrize("n_heads", [1, 40, 128])
def test_any_number_of_heads(n_heads, tmp_path):
    """A prompt in chunks, tokens alone, and few tokens at once over rows."""
    path = write(tmp_path / "model.gguf", n_heads=n_heads)
    engine = open_engine(path, "latent", "f32", n_ctx=64, n_batch=30)
    sequence = engine.new_sequence()
    got = [
        decode(engine, IDS[:40], 38, sequence),
        engine.append([(sequence, IDS[40:].astype(np.int32))], all_logits=True),
    ]
    assert relative(np.concatenate(got), Reference(path).logits(IDS)) < 1e-5


def test_what_a_token_of_deepseek_v3_takes(tmp_path):
    """576 elements in each of 61 layers."""
    path = write(
        tmp_path / "v3.gguf", n_heads=128, d=7168, plain=128, rotating=64, v=128, latent=512, q_latent=1536,
        n_layers=61, sparse=True,
    )  # fmt: skip
    for dtype, size in {"f16": 2 * 576, "q8": 576 + 4}.items():
        row = next(row for row in slimrt.plan(path, cache_type=dtype, n_ctx=1024).rows if row.cache == "latent")
        assert row.bytes_per_token == 61 * size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.kv_lora_rank": None}, "kv_lora_rank' is missing"),
        ({"attention.kv_lora_rank": 31}, "attn_kv_a_mqa.weight' is"),
        ({"attention.value_length_mla": 17}, "attn_output.weight' is"),
        ({"rope.dimension_count": 32}, "latent attention needs some that do not"),
        ({"attention.q_lora_rank": 8}, "attn_q_a.weight' is missing"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, words, tmp_path):
    path = write(tmp_path / "model.gguf", n_heads=3, changes=changes)
    for load in (_core.Engine, _core.plan):
        with pytest.raises(slimrt.ModelFormatError, match=words):
            load(str(path))


def test_sequences_fork_and_are_cut(convert):
    """Rows that two texts share, and a text that goes on from where it was cut."""
    path = convert(GOLDEN / "deepseek2_yarn")
    engine = open_engine(path, "latent", "q8", n_ctx=64, n_seqs=2)
    first = engine.new_sequence()
    decode(engine, IDS[:40], 40, first)
    second = engine.fork(first)
    engine.truncate(second, 33)
    together = engine.append(
        [(first, IDS[40:41].astype(np.int32)), (second, IDS[50:51].astype(np.int32))], all_logits=True
    )
    alone = open_engine(path, "latent", "q8", n_ctx=64, n_seqs=2)
    for logits, ids in zip(together, (IDS[:41], np.append(IDS[:33], IDS[50])), strict=True):
        assert relative(logits, decode(alone, ids, len(ids) - 1)[-1]) < 1e-5


def test_rows_are_passed_over_within_a_budget(tmp_path):
    """As all heads read them; the mean of what is left out stands for it."""
    path = write(tmp_path / "model.gguf", n_heads=4)
    ids = np.random.default_rng(8).integers(3, 100, 1500)
    exact, sparse = (open_engine(path, "latent", "f16", n_ctx=1600, sparse_threshold=budget) for budget in (0.0, 0.05))
    logits = [decode(engine, ids, len(ids) - 4)[-4:] for engine in (exact, sparse)]
    assert 0 < relative(*logits) < 0.02


def test_caches_are_compared_with_rows_of_float32(convert):
    ids = np.random.default_rng(4).integers(3, 100, 128)
    found = slimrt.compare_caches(convert(GOLDEN / "deepseek2"), ids, ["latent:f16", "latent:q4"], window=64)
    kl = [row.kl_mean for row in found.rows]
    assert [row.cache for row in found.rows] == ["latent f32", "latent f16", "latent q4"]
    assert kl[0] == 0 < kl[1] < kl[2]


@pytest.mark.parametrize("options", [{"n_ctx": 200, "n_batch": 16, "n_seqs": 3}, {"n_ctx": 90, "n_threads": 3}])
def test_no_step_needs_more_than_was_planned(options, tmp_path):
    """Appends of all sizes around what either branch takes, after cuts: not a byte more than at the start."""
    engine = _core.Engine(str(write(tmp_path / "model.gguf", n_heads=3, n_layers=2)), **options)
    memory, random, n_ctx = engine.memory(), np.random.default_rng(0), options["n_ctx"]
    assert _core.plan(str(tmp_path / "model.gguf"), **options)["total"] == memory["total"]
    sequences = [engine.new_sequence() for _ in range(options.get("n_seqs", 1))]
    for _ in range(60):
        for sequence in sequences:
            if engine.length(sequence) == n_ctx or random.random() < 0.2:
                engine.truncate(sequence, int(random.integers(engine.length(sequence) + 1)))
        counts = [
            min(int(random.choice([0, 1, 2, 31, 32, 33, 96, n_ctx])), n_ctx - engine.length(s)) for s in sequences
        ]
        items = [(s, np.full(n, 5, np.int32)) for s, n in zip(sequences, counts, strict=True) if n]
        if items:
            engine.append(items, all_logits=bool(random.random() < 0.3))
        assert engine.memory() == memory


@pytest.mark.skipif(bool(CUDA_MISSING), reason=f"no CUDA device: {CUDA_MISSING}")
@pytest.mark.parametrize(
    ("n_heads", "dtype"),
    [(16, "f32"), (16, "f16"), (16, "bf16"), (16, "q8"), (16, "fp8_e4m3"), (16, "q4"), (40, "f16"), (128, "q8")],
)
def test_many_heads_on_cuda(n_heads, dtype, tmp_path):
    """Where whole tiles of matrices fit, and more heads than one call takes; tokens alone go on from the CPU's rows."""
    path = write(tmp_path / "model.gguf", n_heads=n_heads, n_layers=2)
    engines = {device: open_engine(path, "latent", dtype, n_ctx=128, device=device) for device in ("cpu", "cuda")}
    sequences = {device: engine.new_sequence() for device, engine in engines.items()}
    on_cpu, on_device = (decode(engines[d], IDS[:50], 50, sequences[d]) for d in engines)
    assert relative(on_device, on_cpu) < bound("latent", "f32" if dtype == "f32" else "f16", path)
    sequences["cuda"] = engines["cuda"].load_sequence(engines["cpu"].save_sequence(sequences["cpu"]))
    on_cpu, on_device = (decode(engines[d], IDS[50:], 0, sequences[d]) for d in engines)
    assert relative(on_device, on_cpu) < bound("latent", dtype, path)


def test_the_command_line_shows_its_one_mode(run, convert, tmp_path):
    path = str(convert(GOLDEN / "deepseek2"))
    assert "latent  yes, bytes a token: 168 in f16, 96 in q8" in run("inspect", path)[1]
    report = json.loads(run("inspect", path, "--json")[1])
    assert [one["mode"] for one in report["cache_modes"] if one["legal"]] == ["latent"] and report["pays"] == {}
    table = run("plan", path)[1]
    assert re.search(r"^latent .* -$", table, re.M) and "kv: not for this model" in table
    code, _, err = run("convert", path, "-o", str(tmp_path / "out.gguf"), "--cache", "auto")
    assert code != 0 and "there is nothing to choose" in err
    code, out, _ = run(
        "convert", path, "-o", str(tmp_path / "out.gguf"), "--cache", "latent", "--cache-type", "q8", "--verify"
    )
    assert code == 0 and "same top token" in out


def test_rows_are_not_shared(convert, tmp_path):
    model = read_gguf(convert(GOLDEN / "deepseek2"))
    owners = array([0, 0, 2], gguf.GGUFValueType.UINT32)
    write_gguf(tmp_path / "shared.gguf", model.with_metadata({"slimrt.cache.owners": owners}), show_progress=False)
    with pytest.raises(slimrt.UnsupportedError, match="share no rows"):
        _core.Engine(str(tmp_path / "shared.gguf"))
