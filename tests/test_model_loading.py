# SPDX-License-Identifier: Apache-2.0
"""Loading a model, planning its memory, and the sizes in their arguments."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import slimrt
from conftest import GREEDY, PROMPT, TESTS, lies_side_by_side, relative, rms, third_party
from gguf_shapes import Shape, write_random
from slimrt import core
from slimrt.modelfile.gguf import Tensor, read_gguf, write_gguf
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.units import format_both, format_bytes, parse_bytes
from tiny_model import BOS, TOKENS, write_tiny

SHIPPED = TESTS.parent / "models"


def test_k_is_folded_while_loading_and_says_so_to_who_wants_to_know(tiny, capsys, caplog):
    caplog.set_level("INFO", "slimrt")
    with slimrt.Model(tiny, n_ctx=64, cache_type="f32") as kv:
        ids = kv.tokenize(PROMPT)
        expected, size = kv.logits(ids), kv.memory()["cache_bytes_per_token"]
    for verbose in (False, True):
        with slimrt.Model(tiny, n_ctx=64, cache="k", cache_type="f32", verbose=verbose) as k, k.session() as session:
            rows = np.concatenate([session.append([id]) for id in ids])
            assert relative(rows, expected) < 1e-3
            assert k.memory()["cache_bytes_per_token"] * 2 == size
        err = capsys.readouterr().err
        assert err.count("slimrt convert") == err.count("tiny.gguf: llama, 2 layers") == verbose
    said = [record.getMessage() for record in caplog.records if record.name == "slimrt"]
    folded = [text for text in said if "slimrt convert" in text]
    assert len(folded) == 2


@pytest.mark.unsanitized  # whose shadow of memory Python does not see
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("random", "k"),
        ("random", "k+r:q8"),
        ("tale-llama", "k+r:q8"),
        ("tale-llama", "lowrank"),
        ("tale-t5", "k+r"),
        ("tale-neox", "xr:f16"),
        ("tale-neox", "xr:q8"),
    ],
)
def test_folding_takes_no_more_than_planned(name, cache, tmp_path):
    path = SHIPPED / f"{name}.gguf"
    if name == "random":
        path = write_random(tmp_path / "random.gguf", Shape(512, 2, 4, 128, d_ff=64))
    slimrt.Model(path, n_ctx=64).close()  # imports and what is cached
    tracemalloc.start()
    try:
        slimrt.Model(path, n_ctx=64, cache=cache).close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    plan = slimrt.plan(path, n_ctx=64, cache=cache).asked
    assert (plan.folding - plan.mapped) / 6 < peak < plan.folding - plan.mapped


def test_a_fold_that_does_not_fit_is_refused_beforehand(tmp_path):
    """The plan said that it fits, and folding was killed."""
    path = SHIPPED / "tale-llama.gguf"
    limit = slimrt.plan(path, n_ctx=64, cache="k").asked.folding - 1
    plan = slimrt.plan(path, n_ctx=64, cache="k", memory_limit=limit)
    assert plan.asked.total < limit and not plan.fits and "while it is folded does not fit" in plan.conclusion()
    assert f"folding at load, most at once: k {format_bytes(limit + 1)}" in plan.table()
    with pytest.raises(slimrt.WontFitError, match="while it is folded.*slimrt convert") as caught:
        slimrt.Model(path, n_ctx=64, cache="k", memory_limit=limit)
    assert caught.value.needed == limit + 1 and "--cache kv" in caught.value.options
    converted = tmp_path / "k.gguf"
    slimrt.convert(path, converted, cache="k", calibration="none", progress=False)
    slimrt.Model(converted, n_ctx=64, memory_limit=limit).close()
    asked = slimrt.plan(converted, n_ctx=64).asked
    assert asked.cache == "k" and asked.folding == 0


def test_a_context_that_folding_leaves_no_room_for_is_called_so():
    """It was said to be the most that fits, and not that a converted file has room for all of it."""
    path = SHIPPED / "tale-llama.gguf"
    asked = slimrt.plan(path, cache="k").asked
    assert asked.total < asked.folding - 1
    said = "tokens, the most that fits in .* while the model is folded, not 2048: converted for this cache"
    with pytest.warns(UserWarning, match=said):
        model = slimrt.Model(path, cache="k", memory_limit=asked.folding - 1, allow_lossy=True)
    with model:
        assert 256 <= model.n_ctx < 2048


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tale-llama", {"cache": "kv"}),
        ("tale-llama", {"cache": "k:f32"}),
        # folded on a text: with its tokenizer, by an engine of its own
        pytest.param("tale-llama", {"cache": "k+r"}, marks=pytest.mark.unsanitized),
        ("tale-neox", {"cache": "xr", "calibration": "none"}),
        ("tale-t5", {"cache": "k", "cross": "e1", "allow_lossy": True}),
        ("tale-whisper", {}),
        ("tale-chronos", {}),
    ],
)
def test_a_models_file_is_opened_once(name, options, tmp_path):
    """What comes after finds no file at the path any more; it may as well be another one by then."""
    path = Path(shutil.copy(SHIPPED / f"{name}.gguf", tmp_path / "model.gguf"))
    source = ModelSource(path)
    path.unlink()
    slimrt.plan(source, **{key: value for key, value in options.items() if key != "calibration"})
    with slimrt.Model(source, progress=False, **options) as model:
        if name == "tale-whisper":
            assert model.transcribe(np.zeros(16000, np.float32))
        elif name == "tale-chronos":
            assert np.isfinite(model.predict_quantiles(np.arange(30.0), 2)).all()
        elif name == "tale-t5":
            assert model.text2text("copy: one", max_tokens=4)
        else:
            assert model.generate(PROMPT, max_tokens=2).tokens


def test_a_mode_for_each_layer(tiny):
    with slimrt.Model(tiny, n_ctx=64, cache=["kv", "k"], progress=False) as mixed:
        assert [layer["mode"] for layer in mixed.info()["layers"]] == ["kv", "k"]
        assert mixed.generate(PROMPT, max_tokens=2).cache.modes == ("kv", "k")


@pytest.mark.parametrize("mode", ["v", "x"])
def test_modes_without_rope(tmp_path, mode):
    path = write_tiny(tmp_path / "gpt2.gguf", arch="gpt2")
    with slimrt.Model(path, cache_type="f32") as kv, slimrt.Model(path, cache=mode, cache_type="f32") as other:
        expected = kv.generate(PROMPT, max_tokens=20, **GREEDY).tokens
        assert other.generate(PROMPT, max_tokens=20, **GREEDY).tokens == expected


def test_an_illegal_mode_is_refused_before_the_fold(grouped, monkeypatch):
    import slimrt.folding.fold

    monkeypatch.setattr(slimrt.folding.fold, "fold_layers", lambda *a, **k: pytest.fail("folded"))
    with pytest.raises(slimrt.CacheUnsupportedError, match=r"'k' .*layer 0.*Legal for this model: kv"):
        slimrt.Model(grouped, cache="k")
    with pytest.raises(slimrt.CacheUnsupportedError, match="layer 1"):
        slimrt.Model(grouped, cache=["kv", "k"])


def test_too_little_memory_is_said_before_the_fold(tiny, monkeypatch):
    import slimrt.folding.fold

    monkeypatch.setattr(slimrt.folding.fold, "fold_layers", lambda *a, **k: pytest.fail("folded"))
    with pytest.raises(slimrt.WontFitError, match="needs .*, 1000 B available"):
        slimrt.Model(tiny, cache="k", memory_limit=1000)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache": "kk"}, slimrt.UnsupportedError, "'kk'.*did you mean 'k'.*kv, k, k[+]r, v, x, xr"),
        ({"cache": "e1"}, slimrt.UnsupportedError, "'e1' is a mode of cross-attention: give it as cross [(]--cross e1"),
        ({"cache": "lowrank:q2@0.5+q4@0.2"}, ValueError, "newer rows keep fewer columns"),
        ({"cache": ["kv", "z"]}, slimrt.UnsupportedError, "'z'"),
        ({"cache_type": "int3"}, slimrt.UnsupportedError, "f32, f16, bf16"),
        ({"cache_type_v": "fp16"}, slimrt.UnsupportedError, "did you mean 'f16'"),
        ({"device": "tpu"}, slimrt.UnsupportedError, "auto, cpu"),
        ({"on_overflow": "shuffle"}, ValueError, "error, shift"),
        ({"memory_limit": "lots"}, ValueError, "not a size"),
        ({"n_ctx": -1}, ValueError, "n_ctx"),
        ({"sparse_threshold": "0.1"}, TypeError, "sparse_threshold"),
        ({"sparse_threshold": 1}, ValueError, "sparse_threshold must be at least 0 and below 1"),
        ({"sparse_threshold": 0.1, "cache": "kivi"}, slimrt.CacheUnsupportedError, "mode 'kivi'.*use one"),
        ({"n_ctx": 1.5}, TypeError, "n_ctx must be a whole number"),
        ({"n_threads": "all"}, TypeError, "n_threads must be a whole number"),
        ({"seed": "abc"}, TypeError, "seed must be a whole number"),
        ({"n_gpu_layers": -2}, ValueError, "n_gpu_layers must be -1 .all. or more, got -2"),
        ({"seed": -2}, ValueError, "seed must be from 0 to 2.63 - 1, or -1 .a new one., got -2"),
        ({"cache": []}, ValueError, "cache must be a mode"),
        ({"cache": 5}, ValueError, "cache must be a mode"),
        ({"cache": ["kv", None]}, TypeError, "a cache is a mode such as 'kv'.*got None"),
        ({"cache_type": None}, slimrt.UnsupportedError, "f32, f16, bf16"),
        ({"device": None}, slimrt.UnsupportedError, "auto, cpu"),
    ],
)
def test_bad_arguments(tiny, arguments, error, message):
    with pytest.raises(error, match=message):
        slimrt.Model(tiny, **arguments)


def test_files_that_are_no_models(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.gguf: no such file"):
        slimrt.Model(tmp_path / "none.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    with pytest.raises(slimrt.ModelFormatError, match="announces 18446744073709551615 entries"):
        slimrt.Model(bad)
    with pytest.raises(slimrt.ModelFormatError, match="it has no config.json"):
        slimrt.Model(tmp_path)


@pytest.mark.parametrize("rows", [len(TOKENS) - 1, len(TOKENS) + 7])
def test_rows_of_the_embedding_beside_tokens(rows, tiny, tmp_path, run):
    """Published models have more, which no text leads to; a token without one is not looked up behind the last."""
    model, values = read_gguf(tiny), np.random.default_rng(1).normal(size=(rows, 32))
    path = tmp_path / "model.gguf"
    tensors = [Tensor.of(name, values) for name in ("token_embd.weight", "output.weight")]
    write_gguf(path, model.with_tensors(*tensors), show_progress=False)
    if rows > len(TOKENS):
        with slimrt.Model(path, n_ctx=64) as loaded:
            assert loaded.n_vocab == rows and loaded.generate("ab", max_tokens=9, seed=3).text is not None
        return
    said = f"token_embd.weight' has {rows} rows, fewer than the {len(TOKENS)} tokens of tokenizer.ggml.tokens"
    for use in (slimrt.Model, slimrt.plan, lambda path: slimrt.convert(path, tmp_path / "out.gguf")):
        with pytest.raises(slimrt.ModelFormatError, match=said):
            use(path)
    assert said in run("inspect", path)[1]


def test_what_fits_instead(tmp_path):
    tiny = write_tiny(tmp_path / "long.gguf", n_ctx=8192)  # of a long context the cache is the largest part
    whole = slimrt.plan(tiny, n_ctx=8192, n_threads=2)
    k = next(row for row in whole.rows if row.cache == "k")
    limit = k.folding
    needed, allowed = format_both(whole.asked.total, limit)
    with pytest.raises(slimrt.WontFitError, match=f"needs {needed}, {allowed} allowed") as caught:
        slimrt.Model(tiny, n_ctx=8192, memory_limit=limit, n_threads=2)
    error = caught.value
    assert error.needed == whole.asked.total and error.available == limit
    assert "--cache k" in error.options and error.options[0].startswith("--ctx ")
    assert all(option in str(error) for option in error.options)
    largest = int(error.options[0].removeprefix("--ctx "))
    slimrt.Model(tiny, n_ctx=largest, memory_limit=limit, n_threads=2).close()
    slimrt.Model(tiny, n_ctx=8192, cache="k", memory_limit=limit, n_threads=2, progress=False).close()
    with pytest.raises(slimrt.WontFitError, match=f"{largest + 32} tokens"):
        slimrt.Model(tiny, n_ctx=largest + 32, memory_limit=limit, n_threads=2)


def test_default_context(tmp_path, tiny):
    long = write_tiny(tmp_path / "long.gguf", n_ctx=10000)
    with slimrt.Model(long) as model:
        assert model.n_ctx == 4096
        with pytest.raises(slimrt.ContextOverflowError, match="holds 4096.*10000"):
            model.generate([BOS] * 4097)
    with slimrt.Model(tiny) as model:
        assert model.n_ctx == 256


def test_verbose_says_what_was_resolved(tiny, capsys):
    slimrt.Model(tiny, n_ctx=64).close()
    assert capsys.readouterr() == ("", "")
    slimrt.Model(tiny, n_ctx=64, verbose=True).close()
    out, err = capsys.readouterr()
    assert out == "" and "context 64 of 256" in err and "kv f16" in err


def test_a_directory_without_a_tokenizer():
    folder = third_party("models/makemore_lmj9_model")
    golden = json.loads((folder / "golden.json").read_text())
    with slimrt.Model(folder, cache_type="f32") as model:
        with pytest.raises(slimrt.UnsupportedError, match="tokenizer.json"):
            model.tokenize("x")
        with pytest.raises(slimrt.UnsupportedError, match="tokenizer.json"):
            model.generate([0], stop="x")
        assert model.generate([0], max_tokens=3, **GREEDY).text == ""
        assert golden


# ---------------------------------------------------------------- plan
def test_plan_is_what_is_allocated(tiny):
    result = slimrt.plan(tiny, n_ctx=100, n_seqs=2, n_batch=16, cache_type="bf16", memory_limit="1GiB")
    assert [row.cache for row in result.rows] == ["kv", "k", "k+r", "lowrank"]
    assert [mode for mode, reason in result.refused if reason] == ["v", "x", "xr", "latent"]
    assert result.fits and result.asked == result.rows[0]
    for row in result.rows:
        cache = row.cache if row.cache == "lowrank" else f"{row.cache}:bf16"  # whose usual levels are shown
        with slimrt.Model(tiny, n_ctx=100, n_seqs=2, n_batch=16, cache=cache, progress=False) as model:
            memory = model.memory()
            parts = (row.weights, row.derived, row.cache_bytes, row.scratch, row.mapped, row.bytes_per_token)
            names = ("weights", "derived", "cache", "scratch", "mapped", "cache_bytes_per_token")
            assert parts == tuple(memory[name] for name in names)
            assert row.total == memory["total"] + memory["mapped"] == sum(parts[:5])
    json.dumps(result.to_dict())


def test_plan_finds_the_largest_context(tiny):
    half = slimrt.plan(tiny, n_ctx=128).asked.total
    row = slimrt.plan(tiny, n_ctx=256, memory_limit=half).asked
    assert not row.fits and row.max_n_ctx == 128
    assert slimrt.plan(tiny, memory_limit=1000).asked.max_n_ctx == 0
    to_the_byte = slimrt.plan(tiny, n_ctx=100).asked.total  # 128 rows, and a RoPE table of 100
    for less, fits, most in ((0, True, 100), (1, False, 96)):
        row = slimrt.plan(tiny, n_ctx=100, memory_limit=to_the_byte - less).asked
        assert (row.fits, row.max_n_ctx) == (fits, most)
    assert slimrt.plan(tiny).asked.max_n_ctx == 256
    assert slimrt.plan(tiny, cache=["kv", "k"]).asked.cache == "mixed"


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 << 30), ("6g", 6 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), (77, 77), (".5k", 512)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "6 apples", "1e3"])
def test_bad_sizes(text):
    words = "must be at least one byte" if text == "0" else "is not a size"
    with pytest.raises(ValueError, match=f"'{text}'.*{words}"):
        parse_bytes(text)


def test_sizes_for_people():
    assert [format_bytes(n) for n in (5, 2048, 5 << 20, 5.5 * 2**30, 2**42)] == [
        "5 B", "2.0 KiB", "5.0 MiB", "5.5 GiB", "4.0 TiB",
    ]  # fmt: skip
    just_below = (1023, 2**20 - 1, 2**30 - 1, 2**40 - 1, 1023.94 * 1024)  # where rounding makes a whole unit, it is one
    assert [format_bytes(n) for n in just_below] == ["1023 B", "1.0 MiB", "1.0 GiB", "1.0 TiB", "1023.9 KiB"]


def test_sizes_to_be_compared_read_differently_where_they_differ():
    limit = 20 << 20
    assert format_both(limit + 1, limit) == ("20971521 bytes", "20971520 bytes")
    assert format_both(limit, limit) == ("20.0 MiB", "20.0 MiB")
    assert format_both(21 << 20, limit) == ("21.0 MiB", "20.0 MiB")


GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]


def logits_of(path: Path, stored: str, dequantised: bool = False, n_layers: int = 2) -> np.ndarray:
    d = max(32, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]][0])
    write_tiny(path, d=d, d_ff=d, stored=stored, dequantised=dequantised, n_layers=n_layers)
    with slimrt.Model(path, n_ctx=64, cache_type="f32", progress=False) as model:
        return model.logits([3, 40, 41, 50, 7])


SIDE_BY_SIDE = ["Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K"]


WITH_PRODUCT = ["Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", *SIDE_BY_SIDE, *GRIDS]


@pytest.mark.parametrize("stored", WITH_PRODUCT)
def test_types_with_a_product_multiply_as_their_values_do(stored, tmp_path):
    """But for the rounding of activations to int8."""
    got, wanted = logits_of(tmp_path / "q", stored), logits_of(tmp_path / "f", stored, dequantised=True)
    assert rms(got - wanted) < 0.03 * rms(wanted)


def test_ternary_weights_are_held_in_two_bits(tmp_path):
    """TQ1_0 becomes TQ2_0, which holds the same."""
    found = [logits_of(tmp_path / stored, stored) for stored in ("TQ1_0", "TQ2_0")]
    assert np.array_equal(*found)
    plans = [core.plan(str(tmp_path / stored)) for stored in ("TQ1_0", "TQ2_0")]
    matrices = [t for _, (kind, t) in core.GgufFile(str(tmp_path / "TQ2_0")).tensors().items() if kind == "tq2_0"]
    bytes_ = sum(rows * cols // 256 * 66 for rows, cols in matrices)
    assert plans[0]["weights"] == plans[1]["weights"] + bytes_


@pytest.mark.unsanitized  # the command line
@pytest.mark.parametrize("stored", SIDE_BY_SIDE)
def test_rows_side_by_side_take_what_they_take_in_the_file(stored, tmp_path, run):
    """But for tokens' rows, which are no multiple of 16, and are held as they were: q8_0, q6_k, or f16."""
    path = write_tiny(tmp_path / "m", d=256, d_ff=512, stored=stored, n_layers=1)  # heads of 64
    file = core.GgufFile(str(path))
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
    otherwise = {"Q5_0": 34 / 32, "Q3_K": 210 / 256}.get(stored, 2)
    matrices = [shape for name, (_, shape) in file.tensors().items() if not name.endswith("norm.weight")]
    sizes = [rows * cols * (size / block if rows % 16 == 0 else otherwise) for rows, cols in matrices]
    assert len({rows % 16 == 0 for rows, _ in matrices}) == 2
    assert core.plan(str(path))["weights"] == sum(sizes)
    report = json.loads(run("inspect", path, "--json")[1])
    assert sum(tensor["held_bytes"] for tensor in report["tensors"] if "held_as" in tensor) == sum(sizes)
    both = sorted({tensor["held_as"] for tensor in report["tensors"] if "held_as" in tensor})
    assert len(both) == 2 and f"; in memory {both[0]} and {both[1]}, " in run("inspect", path)[1]
    with slimrt.Model(path, n_ctx=64, progress=False) as model:
        assert model.memory()["weights"] == sum(sizes)


def resident(path: Path) -> int:
    """Bytes of a mapped file that count as this process's memory."""
    kib = 0
    for mapping in re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if f" {path}\n" in mapping:
            kib += int(mapping.partition("\nRss:")[2].split()[0])
    return kib << 10


@pytest.mark.unemulated  # resident memory
@pytest.mark.skipif(
    not lies_side_by_side("q4_k", core.cpu_info()["isa"]), reason="Q4_K's rows are read one by one here"
)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_lie_side_by_side_leave_the_file(tied, tmp_path):
    """Q4_K is multiplied as it is stored, and sooner with 16 rows side by side: nothing of it takes memory twice. Rows
    that are only looked up stay in the file: of as many words as are no multiple of 16, or beside an output of its own.
    """
    path = write_tiny(tmp_path / "m", d=256, d_ff=8192, stored="Q4_K")
    if not tied:
        data = read_gguf(path)
        rows = np.tile(data.tensor("token_embd.weight").load(), (2, 1))[:304]
        values = {
            name: replace(data.tensor("token_embd.weight"), name=name, shape=(304, 256), load=lambda: rows)
            for name in ("token_embd.weight", "output.weight")
        }
        write_gguf(tmp_path / "untied", data.with_tensors(*values.values()), show_progress=False)
        path = tmp_path / "untied"
    file = core.GgufFile(str(path))
    quantised = {name: file.tensor_bytes(name) for name, (kind, _) in file.tensors().items() if kind == "q4_k"}
    looked_up = quantised["token_embd.weight"]
    assert {name for name in quantised if core.held(file)[name][0] == "q4_k"} == {"token_embd.weight"}
    with slimrt.Model(path, n_ctx=64, progress=False) as model:
        memory = model.memory()
        assert memory["weights"] == sum(quantised.values()) - looked_up and memory["mapped"] >= looked_up
        assert np.isfinite(model.logits([3, 40, 41, 50, 7])).all()
        assert resident(path) < file.bytes().size / 4


def test_heads_that_are_no_sixteens_of_rows_lie_as_before(tmp_path, run):
    """Q, K and V are read head by head, elsewhere and in other modes: of heads of 8 they are unpacked to f16."""
    got = [logits_of(tmp_path / str(dequantised), "Q4_1", dequantised) for dequantised in (False, True)]  # 4 heads of 8
    assert rms(got[0] - got[1]) < 0.03 * rms(got[1])
    of_file = {name: shape for name, (_, shape) in core.GgufFile(str(tmp_path / "False")).tensors().items()}
    unpacked = [name for name in of_file if name.split(".")[-2] in ("attn_q", "attn_k", "attn_v", "token_embd")]
    sizes = {
        name: rows * cols * (2 if name in unpacked else 20 / 32)
        for name, (rows, cols) in of_file.items()
        if not name.endswith("norm.weight")
    }
    assert len(unpacked) == 7 and core.plan(str(tmp_path / "False"))["weights"] == sum(sizes.values())
    tensors = json.loads(run("inspect", tmp_path / "False", "--json")[1])["tensors"]
    assert {t["name"]: t["held_bytes"] for t in tensors if "held_as" in t} == sizes
    assert all((t["held_as"] == "f16") == (t["name"] in unpacked) for t in tensors if "held_as" in t)


@pytest.mark.parametrize(("stored", "d"), [("Q4_1", 32), ("Q5_1", 32), ("Q2_K", 256)])
def test_what_is_unpacked_is_rounded_to_f16_once(stored, d, tmp_path):
    """By half a unit in the last place, 2^-11 of a weight: below float16's normal numbers weights are multiples of its
    smallest one, as scales are. The logits are those of a file that has what float16 makes of the weights, to the bit.
    """
    source = write_tiny(tmp_path / "m", d=d, d_ff=d, stored=stored)
    data = read_gguf(source)
    parts = ("token_embd",) if d == 256 else ("token_embd", "attn_q", "attn_k", "attn_v")
    odd = [name for name in data.tensors if name.split(".")[-2] in parts]  # rows that are no sixteens; heads of 8
    for name in odd:
        values = data.tensor(name).values()
        halves = values.astype(np.float16)
        error = np.abs(halves - values)
        assert error.any() and (error <= 2.0**-11 * np.abs(values)).all()
        half = replace(
            data.tensor(name), type=gguf.GGMLQuantizationType.F16, load=lambda halves=halves: halves.view(np.uint8)
        )
        data = data.with_tensors(half)
    write_gguf(tmp_path / "f16", data, show_progress=False)
    found = []
    for path in (source, tmp_path / "f16"):
        with slimrt.Model(path, n_ctx=64, cache_type="f32", progress=False) as model:
            found.append([model.logits([3, 40, 41, 50, 7]), model.logits(list(range(3, 50)))])
    for quantised, floats in zip(*found, strict=True):
        assert np.array_equal(quantised, floats)


@pytest.mark.unsanitized  # the command line
@pytest.mark.parametrize("stored", GRIDS)
def test_what_types_of_grids_take_in_memory_is_said(stored, tmp_path, run):
    """By inspect and plan alike: 146 bytes for 256 weights."""
    logits_of(tmp_path / "m", stored, n_layers=1)
    report = json.loads(run("inspect", tmp_path / "m", "--json")[1])
    held = [tensor for tensor in report["tensors"] if "held_as" in tensor]
    assert {tensor["type"] for tensor in held} == {stored.lower()}
    assert all(tensor["held_bytes"] == tensor["rows"] * tensor["cols"] // 256 * 146 for tensor in held)
    assert core.plan(str(tmp_path / "m"))["weights"] == sum(tensor["held_bytes"] for tensor in held)
    assert f"; in memory {held[0]['held_as']}, " in run("inspect", tmp_path / "m")[1]
