# SPDX-License-Identifier: Apache-2.0
"""The planner's table for models with an encoder is the paper's, and its bytes are those that are allocated."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

import slimrt
from gguf_shapes import finish
from slimrt import _core
from slimrt.cache.config import CacheChoice
from slimrt.modelfile.source import ModelSource
from whisper_shapes import N_CTX, SIZES, write_whisper

gigabytes = pytest.mark.unsanitized  # are allocated

# Graef and Wasielewski, "Slim attention", table of Whisper (docs/cache-math.md, section 6): millions of elements of the
# baseline and of option 2 without E; how much smaller with E; how many fewer reads at batch 64 with E on chip.
PAPER = {
    "tiny": (6.0, 0.7, 4.7, 5.6),
    "base": (12.0, 1.4, 5.6, 5.8),
    "small": (35.9, 4.1, 6.8, 5.8),
    "medium": (95.7, 11.0, 7.6, 5.6),
    "large": (159.6, 18.4, 7.9, 5.3),
}
WITHOUT_E = 8.7
READ_AGAIN = (1.83, 1.87)  # if every layer reads E again


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """whisper(size) -> a file of its shape."""
    folder, made = tmp_path_factory.mktemp("whisper"), {}

    def path(size: str):
        if size not in made:
            made[size] = write_whisper(folder / f"{size}.gguf", SIZES[size])
        return made[size]

    return path


def options(path, **arguments) -> dict[str, slimrt.results.EncoderRow]:
    return {row.name: row for row in slimrt.plan(path, memory_limit="64GiB", **arguments).encoder}


@pytest.mark.unsanitized  # dry engines of large shapes
@pytest.mark.parametrize("size", PAPER)
def test_the_papers_table(size, whisper):
    baseline, option_2, with_e, on_chip = PAPER[size]
    rows = options(whisper(size), n_seqs=64)
    assert list(rows) == ["baseline", "option 1", "option 2, x", "option 2, k"]
    first = rows["baseline"]
    exact = first.self_bytes + first.cross_bytes * 1500 // 1504  # rows are kept in blocks of 32
    assert round(exact / 64 / 2 / 1e6, 1) == baseline
    assert first.cache_bytes == 2 * rows["option 1"].cache_bytes
    for name in ("option 2, x", "option 2, k"):
        row = rows[name]
        assert round(row.uncounted / 64 / 2 / 1e6, 1) == option_2
        assert round(first.uncounted / row.uncounted, 1) == WITHOUT_E
        assert round(first.cache_bytes / row.cache_bytes, 1) == with_e
        assert round(first.read_on_chip / row.read_on_chip, 1) == on_chip
        assert READ_AGAIN[0] <= round(first.read / row.read, 2) <= READ_AGAIN[1]


@gigabytes
@pytest.mark.parametrize("size", ["tiny", "base", "small", "medium", "large-v3"])
@pytest.mark.parametrize(("mode", "cross"), [("kv", "kv"), ("x", "e")])
def test_measured_cache_bytes_are_the_planners(mode, cross, size, whisper):
    """An engine of the shape, its weights zero."""
    path = whisper(size)
    (row,) = (
        row for row in options(path, cache=mode, cross=cross).values() if (row.modes[0], row.cross) == (mode, cross)
    )
    engine = _core.Engine(str(path), n_ctx=N_CTX, cache=mode, cross=cross)
    assert engine.memory()["cache"] == row.cache_bytes
    assert engine.memory() == {key: _core.plan(str(path), n_ctx=N_CTX, cache=mode, cross=cross)[key]
                               for key in engine.memory()}  # fmt: skip


@pytest.mark.parametrize("type_name", ["f32", "q8"])
def test_another_type_and_several_at_once(type_name, whisper):
    path = whisper("tiny")
    for row in options(path, n_seqs=3, cache_type=type_name, cross_type=type_name).values():
        given = {"n_ctx": N_CTX, "n_seqs": 3, "cache": row.modes[0], "cross": row.cross, "cross_type": type_name}
        planned = _core.plan(str(path), cache_type_k=type_name, cache_type_v=type_name, **given)
        assert planned["cache"] == row.cache_bytes


def test_what_auto_chooses_is_what_is_loaded(whisper):
    path = whisper("tiny")
    plan = slimrt.plan(path)
    assert set(plan.asked.modes) == {"x"} == set(CacheChoice.of("auto").arguments(ModelSource(path))["cache"])
    with slimrt.Model(path) as model:
        assert {layer["mode"] for layer in model.info()["layers"]} == {"x"}
        assert model.info()["cross"]["mode"] == "e" and "serves all 4 layers" in model.info()["cross"]["reason"]
        assert model.memory()["cache"] == plan.asked.cache_bytes == plan.encoder[2].cache_bytes


def test_a_model_without_an_encoder_has_no_such_table(tiny):
    assert slimrt.plan(tiny).encoder == ()
    with pytest.raises(ValueError, match=r"cross, cross_type and n_source are for models with an encoder.*leave them"):
        slimrt.plan(tiny, cross="e")


@pytest.mark.usefixtures("clean_environment")
def test_the_command_prints_it(run, whisper):
    code, out, _ = run("plan", whisper("tiny"), "--parallel", "64")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("option 2, x"))
    assert "4.7" in line and "8.71x" in line and "x f16" in line and "e f16" in line
    code, out, _ = run("plan", whisper("tiny"), "--cross", "kv", "--cross-type", "q8", "--cache", "x", "--json")
    assert code == 0 and json.loads(out)["encoder"][-1]["name"] == "this choice"


# ---------------------------------------------------------------- T5-11B's inner width
D, INNER, HEADS, T5_LAYERS, T5_CTX = 1024, 16384, 128, 2, 64


@pytest.fixture(scope="module")
def wide_t5(tmp_path_factory):
    """A T5 with 16 times as wide an attention as its model, as T5-11B: random, f16. Large matrices are a smaller random
    one turned round, which costs less to make and is as good here."""
    path = tmp_path_factory.mktemp("t5") / "wide.gguf"
    writer, random = gguf.GGUFWriter(path, "t5"), np.random.default_rng(11)
    for key, value in {
        "block_count": 1,
        "decoder_block_count": T5_LAYERS,
        "embedding_length": D,
        "feed_forward_length": 64,
        "attention.head_count": HEADS,
        "attention.key_length": INNER // HEADS,
        "attention.value_length": INNER // HEADS,
        "context_length": 512,
        "attention.relative_buckets_count": 32,
        "decoder_start_token_id": 0,
        "vocab_size": 128,
    }.items():
        writer.add_uint32(f"t5.{key}", value)
    writer.add_float32("t5.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_string("slimrt.activation", "relu")
    block = (random.normal(size=(INNER, D)) / np.sqrt(D)).astype(np.float16)

    def matrix(rows: int, cols: int, size: float = 1.0) -> np.ndarray:
        """Elements of variance size^2 / cols."""
        flat = np.roll(block, int(random.integers(1, block.size))).ravel()[: rows * cols].reshape(rows, cols)
        return (flat * np.float16(size * np.sqrt(D / cols))).astype(np.float16)

    writer.add_tensor("token_embd.weight", matrix(128, D, size=np.sqrt(D)))
    writer.add_tensor("output.weight", matrix(128, D))
    for part, n_layers in (("enc", 1), ("dec", T5_LAYERS)):
        writer.add_tensor(f"{part}.output_norm.weight", np.ones(D, np.float32))
        rel_b = random.normal(size=(32, HEADS)).astype(np.float32)
        writer.add_tensor(f"{part}.blk.0.attn_rel_b.weight", rel_b)
        attentions = ("attn", "cross_attn") if part == "dec" else ("attn",)
        for prefix in (f"{part}.blk.{layer}." for layer in range(n_layers)):
            for attention in attentions:
                writer.add_tensor(f"{prefix}{attention}_norm.weight", np.ones(D, np.float32))
                writer.add_tensor(f"{prefix}{attention}_q.weight", matrix(INNER, D, size=(INNER / HEADS) ** -0.5))
                writer.add_tensor(f"{prefix}{attention}_k.weight", matrix(INNER, D))
                writer.add_tensor(f"{prefix}{attention}_v.weight", matrix(INNER, D))
                writer.add_tensor(f"{prefix}{attention}_o.weight", matrix(D, INNER))
            writer.add_tensor(f"{prefix}ffn_norm.weight", np.ones(D, np.float32))
            writer.add_tensor(f"{prefix}ffn_up.weight", matrix(64, D))
            writer.add_tensor(f"{prefix}ffn_down.weight", matrix(D, 64))
    return finish(writer, path)


@gigabytes
def test_x_is_a_thirty_second_of_kv_where_attention_is_sixteen_times_as_wide(wide_t5):
    rows = options(wide_t5, n_ctx=T5_CTX)
    assert rows["baseline"].self_bytes == 32 * rows["option 2, x"].self_bytes
    assert rows["baseline"].cross_bytes == 32 * T5_LAYERS * rows["option 2, x"].cross_bytes


@gigabytes
def test_and_says_the_same_words(wide_t5):
    """Greedily, in float32, from a source of 40 tokens."""
    said, held = {}, {}
    read = np.random.default_rng(3).integers(1, 128, 40).astype(np.int32)
    for mode in ("kv", "x"):
        types = {"cache_type_k": "f32", "cache_type_v": "f32", "cross": "e", "cross_type": "f32"}
        engine = _core.Engine(str(wide_t5), n_ctx=T5_CTX, n_source=64, n_batch=64, cache=mode, **types)
        sequence, ids = engine.new_sequence(), [0]
        engine.encode([(sequence, read)])
        for _ in range(24):
            ids.append(int(engine.append([(sequence, np.array(ids[-1:], np.int32))])[0].argmax()))
        said[mode], held[mode] = ids, engine.info()["layers"][0]["bytes_per_token"]
        del engine
    assert said["x"] == said["kv"] and len(set(said["kv"])) > 4
    assert held["kv"] == 32 * held["x"] == 2 * INNER * 4
