# SPDX-License-Identifier: Apache-2.0
"""Broken, hostile and absurd GGUF files: a typed error that names the culprit, never a crash or a hang."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import slimrt
from gguf_shapes import Shape, write_random
from slimrt import _core

SMALL = Shape(32, 2, 4, 64, d_ff=48, n_vocab=50)

# Loads every file named on stdin, runs a few tokens, and says what happened to each: a crash ends it early.
RUNNER = """
import sys
import numpy as np
import slimrt
from slimrt import _core

for path in sys.stdin.read().split():
    print(path, end=" ", flush=True)
    try:
        file = _core.GgufFile(path)
        for key in file.keys():
            file.value(key)
        for name in list(file.tensors())[:50]:
            file.read(name)
        _core.plan(path)
        engine = _core.Engine(path, n_ctx=8, memory_limit=1 << 28)
        engine.append([(engine.new_sequence(), np.array([3, 1, 4], np.int32))])
        print("ok", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " ")[:200] or "-", flush=True)
"""
TYPED = {"ModelFormatError", "UnsupportedError", "WontFitError", "CacheUnsupportedError", "ContextOverflowError"}


def outcomes(paths: list[Path]) -> dict[str, str]:
    """File name -> "ok" or the name of the exception and its message."""
    text = "\n".join(str(path) for path in paths)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"died with {done.returncode} after: {done.stdout[-400:]}\n{done.stderr[-2000:]}"
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(found) == len(paths)
    return {Path(path).name: outcome for path, outcome in found.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_random(tmp_path_factory.mktemp("good") / "model.gguf", SMALL)


@pytest.fixture(scope="module")
def data_offset(model) -> int:
    return gguf.GGUFReader(model).data_offset


# ---------------------------------------------------------------- cut and flipped files
def test_the_whole_file_is_good(model):
    assert outcomes([model]) == {"model.gguf": "ok"}


def test_cut_anywhere(model, data_offset, tmp_path):
    """25 places in the header, 25 in the data."""
    raw = model.read_bytes()
    places = [*np.linspace(0, data_offset, 25, dtype=int), *np.linspace(data_offset, len(raw) - 33, 25, dtype=int)]
    files = [tmp_path / f"{i}_{place}.gguf" for i, place in enumerate(places)]
    for file, place in zip(files, places, strict=True):
        file.write_bytes(raw[:place])
    for name, outcome in outcomes(files).items():
        assert outcome.startswith("ModelFormatError"), (name, outcome)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_flipped_header_bytes(mask, model, data_offset, tmp_path):
    raw = model.read_bytes()
    files = []
    for place in np.linspace(0, data_offset - 1, 50, dtype=int):
        files.append(tmp_path / f"{place}.gguf")
        files[-1].write_bytes(raw[:place] + bytes([raw[place] ^ mask]) + raw[place + 1 :])
    found = outcomes(files)
    assert all(outcome == "ok" or outcome.split()[0] in TYPED for outcome in found.values()), found
    assert found["0.gguf"].startswith("ModelFormatError")


def test_counts_and_lengths_that_would_overflow(model, tmp_path):
    """Every 32 bit word of the first 400 bytes, and every aligned 64 bit one, set to huge values."""
    raw = model.read_bytes()
    files = []
    for place in range(4, 400, 4):
        for size, value in ((4, 0xFFFFFFFF), (4, 0x7FFFFFFF), (8, 2**64 - 1), (8, 2**63), (8, 2**61), (8, 2**32)):
            files.append(tmp_path / f"{place}_{size}_{value:x}.gguf")
            files[-1].write_bytes(raw[:place] + struct.pack("<I" if size == 4 else "<Q", value) + raw[place + size :])
    found = outcomes(files)
    assert all(outcome == "ok" or outcome.split()[0] in TYPED for outcome in found.values()), found


def test_not_a_model_at_all(tmp_path):
    contents = {
        "empty": b"",
        "magic": b"GGUF",
        "text": b"Once upon a time" * 100,
        "zeros": bytes(5000),
        "ones": b"\xff" * 5000,
        "old": struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
        "future": struct.pack("<4sIQQ", b"GGUF", 99, 0, 0) + bytes(64),
        "big_endian": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(64),
        "nothing_in_it": struct.pack("<4sIQQ", b"GGUF", 3, 0, 0) + bytes(64),
    }
    files = [tmp_path / f"{name}.gguf" for name in contents]
    for file, content in zip(files, contents.values(), strict=True):
        file.write_bytes(content)
    for name, outcome in outcomes(files).items():
        assert outcome.split()[0] in ("ModelFormatError", "UnsupportedError"), (name, outcome)


def test_a_pointer_of_git_lfs_is_called_that(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(slimrt.ModelFormatError, match=r"m\.gguf: .*a pointer of Git LFS.*git lfs pull"):
        _core.GgufFile(str(file))


@pytest.mark.parametrize("names", [("m.gguf-split-a", "m.gguf-split-b"), ("m.gguf.part1of2", "m.gguf.part2of2")])
def test_pieces_of_a_file_are_to_be_joined_not_downloaded_again(names, model, tmp_path):
    whole = model.read_bytes()
    pieces = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    for name, piece in zip(names, pieces, strict=True):
        (tmp_path / name).write_bytes(piece)
        with pytest.raises(slimrt.ModelFormatError, match=f"{name}: .*piece of a file: join all"):
            _core.GgufFile(str(tmp_path / name))
    broken_off = tmp_path / "m.gguf.part"  # as browsers name it
    broken_off.write_bytes(pieces[0])
    with pytest.raises(slimrt.ModelFormatError, match="truncated or damaged; download it again"):
        _core.GgufFile(str(broken_off))


def test_paths_that_are_no_file(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(OSError, match=path.name):
            _core.GgufFile(str(path))
        with pytest.raises(OSError, match=path.name):
            _core.Engine(str(path))


# ---------------------------------------------------------------- well-formed files that make no sense
def half(*dims: int) -> np.ndarray:
    return np.ones(dims, np.float16)


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


TENSORS = {
    "missing": ({"blk.1.ffn_up.weight": None}, slimrt.ModelFormatError, "blk.1.ffn_up.weight"),
    "missing embedding": ({"token_embd.weight": None}, slimrt.ModelFormatError, "token_embd.weight"),
    "missing norm": ({"output_norm.weight": None}, slimrt.ModelFormatError, "output_norm.weight"),
    "too many rows": ({"blk.0.attn_q.weight": half(33, 32)}, slimrt.ModelFormatError, "blk.0.attn_q.weight"),
    "too few columns": ({"blk.0.attn_q.weight": half(32, 31)}, slimrt.ModelFormatError, "blk.0.attn_q.weight"),
    "short norm": ({"blk.1.attn_norm.weight": np.ones(31, np.float32)}, slimrt.ModelFormatError, "blk.1.attn_norm"),
    "transposed": ({"blk.0.ffn_up.weight": half(32, 48)}, slimrt.ModelFormatError, "blk.0.ffn_up.weight"),
    "three dimensions": ({"blk.0.ffn_up.weight": half(2, 48, 32)}, slimrt.SlimrtError, "blk.0.ffn_up.weight"),
    "short head": ({"output.weight": half(49, 32)}, slimrt.ModelFormatError, "output.weight"),
    "empty": ({"blk.0.ffn_up.weight": half(0, 32)}, slimrt.ModelFormatError, "blk.0.ffn_up.weight"),
    "empty extra": ({"nothing.weight": half(0, 32)}, slimrt.SlimrtError, "nothing.weight"),
    "unknown": ({"blk.0.surprise.weight": half(4, 32)}, slimrt.UnsupportedError, "blk.0.surprise.weight"),
    "unknown bias": ({"blk.1.attn_norm.bias": np.ones(32, np.float32)}, slimrt.UnsupportedError, "attn_norm.bias"),
    "a layer too many": ({"blk.2.attn_q.weight": half(32, 32)}, slimrt.UnsupportedError, "blk.2.attn_q.weight"),
    "integer weights": ({"blk.0.attn_q.weight": np.ones((32, 32), np.int32)}, slimrt.SlimrtError, "blk.0.attn_q"),
    "rope factor 0": ({"rope_freqs.weight": np.zeros(4, np.float32)}, slimrt.ModelFormatError, "no finite angle"),
    "rope factors": ({"rope_freqs.weight": np.ones(3, np.float32)}, slimrt.ModelFormatError, "rope_freqs.weight"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_belong(case, tmp_path):
    edit, error, name = TENSORS[case]
    path = write_random(tmp_path / "model.gguf", SMALL, edit=edit)
    for load in (_core.Engine, _core.plan):
        with pytest.raises(error, match=name):
            load(str(path), n_ctx=8)


METADATA = {
    "no heads": ({"attention.head_count": 0}, "head_count' is 0, expected 1"),
    "heads that do not divide": (
        {"attention.head_count": 5, "attention.head_count_kv": 5},
        "32 is not a multiple of head_count 5",
    ),
    "absurd heads": (
        {"attention.head_count": 2**31, "attention.head_count_kv": 2**31},
        "head_count' is 2147483648, expected 1 to 16384",
    ),
    "more kv heads than heads": ({"attention.head_count_kv": 8}, "head_count_kv' is 8, expected 1 to 4"),
    "kv heads that do not divide": ({"attention.head_count_kv": 3}, "4 is not a multiple of head_count_kv 3"),
    "no kv heads": ({"attention.head_count_kv": 0}, "head_count_kv' is 0, expected 1 to 4"),
    "other heads than the tensors": (
        {"attention.head_count_kv": 2},
        r"attn_k.weight' is \[32, 32\], expected \[16, 32\]",
    ),
    "no layers": ({"block_count": 0}, "block_count' is 0, expected 1"),
    "a layer missing": ({"block_count": 3}, "'blk.2.attn_norm.weight' is missing"),
    "a million layers": ({"block_count": 1_000_000}, "block_count' is 1000000, expected 1 to 4096"),
    "no width": ({"embedding_length": 0}, "embedding_length' is 0, expected 1"),
    "other width": ({"embedding_length": 64}, r"token_embd.weight' is \[50, 32\], expected \[50, 64\]"),
    "no context": ({"context_length": 0}, "context_length' is 0, expected 1"),
    "context left out": ({"context_length": None}, "context_length' is missing"),
    "width left out": ({"embedding_length": None}, "embedding_length' is missing"),
    "epsilon left out": ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
    "epsilon not a number": (
        {"attention.layer_norm_rms_epsilon": float("nan")},
        "layer_norm_rms_epsilon' is a float, expected a finite",
    ),
    "epsilon negative": ({"attention.layer_norm_rms_epsilon": -1.0}, "epsilon is negative: -1"),
    "text for a number": ({"block_count": "two"}, "block_count' is a string, expected an integer"),
    "fraction for a count": ({"block_count": 2.5}, "block_count' is a float, expected an integer"),
    "part of a head rotated": (
        {"rope.dimension_count": 4},
        "4 of 8 dimensions",
    ),  # which Llama's interleaved pairs do not know
    "odd rotation": ({"rope.dimension_count": 7}, "dimension_count is odd: 7"),
    "rotation wider than a head": ({"rope.dimension_count": 16}, "dimension_count' is 16, expected 2 to 8"),
    "no base": ({"rope.freq_base": 0.0}, "freq_base and factor must be positive"),
    "base not a number": ({"rope.freq_base": float("nan")}, "freq_base' is a float, expected a finite"),
    "base infinite": ({"rope.freq_base": float("inf")}, "freq_base' is a float, expected a finite"),
    "negative base": ({"rope.freq_base": -10000.0}, "freq_base and factor must be positive"),
    "unknown scaling": ({"rope.scaling.type": "spiral"}, "type 'spiral' is not supported"),
    "no factor": ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "freq_base and factor must be positive"),
    "factor not a number": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": float("nan")},
        "factor' is a float, expected a finite",
    ),
    "longrope without factors": ({"rope.scaling.type": "longrope"}, "rope_factors_short.weight' is missing"),
    "no logarithm": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_beta_fast": -1.0},
        "pair 0 no finite angle",
    ),
    "cos times infinity": (
        {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 3e38, "rope.scaling.factor": 1e9},
        "pair 0 no finite angle",
    ),
    "wide head": ({"attention.key_length": 2**30}, "key_length' is 1073741824, expected 1 to 65536"),
    "values unlike keys": (
        {"attention.key_length": 8, "attention.value_length": 4},
        "value_length differs from key_length",
    ),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_makes_no_sense(case, tmp_path):
    changes, words = METADATA[case]
    path = write_random(tmp_path / "model.gguf", SMALL, changes=changes)
    for load in (_core.Engine, _core.plan):
        with pytest.raises((slimrt.ModelFormatError, slimrt.UnsupportedError), match=words) as caught:
            load(str(path), n_ctx=8)
        assert str(path) in str(caught.value)


def test_unknown_architecture_names_the_known_ones(tmp_path):
    path = write_random(tmp_path / "model.gguf", Shape(32, 2, 4, 64, arch="mamba"))
    with pytest.raises(slimrt.UnsupportedError, match="mamba") as caught:
        _core.Engine(str(path))
    assert all(name in str(caught.value) for name in [one["name"] for one in _core.architectures()])


@pytest.mark.parametrize("number", [16, 36, 999, 2**32 - 1])
def test_unknown_tensor_type_names_the_tensor(number, model, tmp_path):
    raw, name = model.read_bytes(), b"blk.0.attn_k.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8  # after the count of dimensions and two of them
    assert struct.unpack_from("<I", raw, at)[0] == 1
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[:at] + struct.pack("<I", number) + raw[at + 4 :])
    with pytest.raises(slimrt.SlimrtError, match="blk.0.attn_k.weight"):
        _core.Engine(str(path))


def test_text_that_is_not_utf8(model, tmp_path):
    """In the name of the architecture, a key, a tensor: an error that can be read; in a free text: no matter."""
    raw = model.read_bytes()
    for text, words in (
        (b"llama", "architecture '\ufffd\ufffdama' is not supported"),
        (b"llama.block_count", "metadata entry .* has a name that is not printable ASCII"),
        (b"blk.0.attn_q.weight", "tensor .* has a name that is not printable ASCII"),
    ):
        path = tmp_path / "model.gguf"
        at = raw.index(struct.pack("<Q", len(text)) + text) + 8
        path.write_bytes(raw[:at] + b"\xff\xfe" + raw[at + 2 :])
        for load in (_core.Engine, _core.plan):
            with pytest.raises((slimrt.ModelFormatError, slimrt.UnsupportedError), match=words):
                load(str(path), n_ctx=8)
    writer_text = write_random(tmp_path / "named.gguf", SMALL, name="Zoe the model")
    writer_text.write_bytes(writer_text.read_bytes().replace(b"Zoe", b"Zo\xeb"))
    assert _core.Engine(str(writer_text), n_ctx=8).info()["name"].startswith("Zo")


@pytest.mark.parametrize("value", [np.nan, np.inf, 6e4])
def test_weights_that_are_not_numbers_neither_crash_nor_hang(value, tmp_path):
    weight = half(32, 32)
    weight[3, 5] = value
    path = write_random(tmp_path / "model.gguf", SMALL, edit={"blk.0.attn_q.weight": weight})
    try:
        with slimrt.Model(path, n_ctx=16) as model:
            assert model.logits([3, 1, 4]).shape == (3, 50)
            assert len(model.generate([3, 1, 4], max_tokens=4).tokens) <= 4
    except (slimrt.SlimrtError, ValueError) as error:
        assert "nan" in str(error).lower() or "finite" in str(error).lower(), error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_ctx": -1}, "n_ctx (must not be negative, got -1|-1 is not possible)"),
        ({"n_batch": 0}, "n_seqs and n_batch must be at least 1"),
        ({"n_batch": -5}, "n_seqs and n_batch must be at least 1"),
        ({"n_seqs": 0}, "n_seqs and n_batch must be at least 1"),
        ({"n_seqs": -1}, "n_seqs and n_batch must be at least 1"),
        ({"n_threads": -1}, "n_threads must be from 1 to 1024"),
        ({"n_ctx": 1, "n_seqs": 2**24}, "a cache of 1 tokens x 16777216 sequences.*is more than"),
    ],
    ids=str,
)
def test_arguments_out_of_range(options, words, model):
    for load in (_core.Engine, _core.plan, lambda path, **o: slimrt.Model(path, **o)):
        with pytest.raises(ValueError, match=words):
            load(str(model), **options)


SIZES = """
import resource, sys
import slimrt._core
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    slimrt._core.{call}(sys.argv[1], **{options})
    print("ok")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.unsanitized
@pytest.mark.parametrize("call", ["Engine", "plan"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_ctx": 2**40}, "ValueError n_ctx 1099511627776 is not possible"),
        ({"n_ctx": 2**62}, "ValueError n_ctx 4611686018427387904 is not possible"),
        ({"n_seqs": 2**30, "n_ctx": 64}, "ValueError a cache of 64 tokens x 1073741824 sequences"),
        ({"n_ctx": 2**22}, {"Engine": "WontFitError needs ", "plan": "ok"}),
        ({"n_batch": 2**30}, "ok"),  # no step has more tokens than there are
    ],
    ids=str,
)
def test_sizes_beyond_any_machine_take_no_memory_or_time(options, said, call, model):
    """Both refuse what no cache can address; else a plan says the size, and an engine that it won't fit."""
    code = SIZES.format(call=call, options=options | {"memory_limit": 1 << 30} if call == "Engine" else options)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said if isinstance(said, str) else said[call]), done.stdout
    assert time.monotonic() - start < 10
