# SPDX-License-Identifier: Apache-2.0
"""What a step of one token asks of a CUDA device; the emulator counts it (tests/emulated.sh).

A kernel costs some two microseconds at decoding, whatever it does: of a small model that is half of the time. A copy
from the host costs as much, and a row of logits to it, of 152 thousand tokens, a hundred.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import slimrt
from conftest import open_engine
from gguf_shapes import Shape, write_random
from slimrt import _core

MODEL = Shape(d=256, n_layers=1, n_heads=4, n_ctx=128, d_ff=512, n_vocab=64)  # of sizes that have the fast kernels
emulator = ctypes.CDLL(_core.__file__)
launches = getattr(emulator, "slimrt_emulated_launches", None)
pytestmark = pytest.mark.skipif(launches is None, reason="counted by the emulator of CUDA")
if launches is not None:
    uploads, bytes_down = emulator.slimrt_emulated_uploads, emulator.slimrt_emulated_bytes_down
    for counter in (launches, uploads, bytes_down):
        counter.restype = ctypes.c_uint64


def of_steps(path: Path, mode: str, counter, n: int = 3, **options) -> list[int]:
    """Of the steps after a prompt of 57 tokens: by single calls, recorded, and played."""
    engine = open_engine(path, mode, "f16", device="cuda")
    sequence = engine.new_sequence()
    engine.append([(sequence, np.arange(3, 60, dtype=np.int32))])
    counts = [counter()]
    for _ in range(n):
        engine.append([(sequence, np.asarray([5], np.int32))], **options)
        counts.append(counter())
    return np.diff(counts).tolist()


@pytest.mark.parametrize(
    ("arch", "mode", "n", "kv_heads"),
    [
        ("llama", "kv", 7, (4, 2, 1)),
        ("llama", "k", 8, (4,)),
        ("llama", "k+r", 17, (4, 2, 1)),
        ("gpt2", "x", 10, (4, 2, 1)),
        ("phi2", "xr", 12, (4, 2, 1)),
        ("llama", "lowrank", 15, (4, 2, 1)),
    ],
)
def test_kernels_of_a_layer(arch, mode, n, kv_heads, tmp_path):
    """As many for grouped heads as where each has its own K."""
    changes = {"rope.dimension_count": MODEL.dk // 2} if mode == "xr" else {}
    for heads in kv_heads:
        shapes = [replace(MODEL, arch=arch, n_kv_heads=heads, n_layers=layers) for layers in (1, 2)]
        paths = [write_random(tmp_path / f"{heads} {shape.n_layers}.gguf", shape, changes) for shape in shapes]
        one, two = (of_steps(path, mode, launches)[-1] for path in paths)
        assert two - one == n, heads


@pytest.mark.parametrize("arch", ["llama", "gemma3"])  # layers of one group, and with windows, of two
def test_all_that_a_step_reads_is_one_copy(arch, tmp_path):
    """Where a block of the cache begins too."""
    path = write_random(tmp_path / "model.gguf", replace(MODEL, arch=arch, n_layers=6))
    assert of_steps(path, "kv", uploads, 10) == [1] * 10


def test_logits_stay_where_they_are_if_the_likeliest_token_is_wanted(tmp_path):
    path = write_random(tmp_path / "model.gguf", MODEL)
    assert of_steps(path, "kv", bytes_down) == [4 * MODEL.n_vocab] * 3
    assert of_steps(path, "kv", bytes_down, tokens=True) == [4] * 3


@pytest.mark.parametrize("n_vocab", [64, 1500])
def test_logits_stay_where_they_are_if_the_likeliest_tokens_decide(n_vocab, tmp_path):
    path = write_random(tmp_path / "model.gguf", replace(MODEL, n_vocab=n_vocab))
    assert of_steps(path, "kv", bytes_down, candidates=True) == [8 * min(n_vocab, 256)] * 3


def test_candidates_are_the_largest_logits(tmp_path):
    """Of more rows than go through the head at once, with equals (rows of the head that are the same)."""
    path = write_random(tmp_path / "model.gguf", replace(MODEL, n_vocab=1500))
    reader = gguf.GGUFReader(path, "r+")
    (head,) = [t.data for t in reader.tensors if t.name in ("output.weight", "token_embd.weight")][-1:]
    head[:] = head[np.arange(1500) // 4]  # logits come in fours, and candidates end within one
    head.flush()
    del head, reader
    engine = open_engine(path, "kv", "f16", device="cuda")
    found = []
    for kind in ({}, {"candidates": True}):
        sequence = engine.new_sequence()
        found.append(engine.append([(sequence, np.arange(3, 45, dtype=np.int32))], all_logits=True, **kind))
        engine.free_sequence(sequence)
    logits, candidates = found
    candidates = candidates.view(np.int32)
    ids = np.sort(np.argsort(-logits, axis=-1, kind="stable")[:, :256], axis=-1)
    assert np.array_equal(candidates[:, 256:], ids)
    assert np.array_equal(candidates[:, :256].view(np.float32), np.take_along_axis(logits, ids, axis=-1))
    of_rows, of_candidates = ([_core.Sampler(seed=i, top_k=1 + i) for i in range(len(logits))] for _ in range(2))
    for _ in range(10):
        assert engine.sample_candidates(candidates, of_candidates) == engine.sample(logits, of_rows)


def test_the_token_that_greedy_sampling_takes(tmp_path):
    """Of several rows, some of them equal tokens' (rows of the head that are the same): the lowest id."""
    path = write_random(tmp_path / "model.gguf", replace(MODEL, n_vocab=50))
    reader = gguf.GGUFReader(path, "r+")
    (head,) = [t.data for t in reader.tensors if t.name in ("output.weight", "token_embd.weight")][-1:]
    head[:] = head[np.arange(50) // 2]  # logits come in pairs
    head.flush()
    del head, reader
    engine = open_engine(path, "kv", "f16", device="cuda")
    rows = []
    for kind in ({}, {"tokens": True}):
        sequence = engine.new_sequence()
        rows.append(engine.append([(sequence, np.arange(3, 45, dtype=np.int32))], all_logits=True, **kind))
        engine.free_sequence(sequence)
    logits, tokens = rows
    assert tokens.shape == (42, 1)
    greedy = [token for token, _ in engine.sample(logits, [_core.Sampler(temperature=0.0) for _ in logits])]
    assert tokens.view(np.int32)[:, 0].tolist() == greedy
    assert all(token % 2 == 0 for token in greedy)


def test_broken_weights_are_told(tmp_path):
    path = write_random(tmp_path / "model.gguf", MODEL)
    reader = gguf.GGUFReader(path, "r+")
    (norm,) = [t.data for t in reader.tensors if t.name == "output_norm.weight"]
    norm[0] = np.nan
    norm.flush()
    del norm, reader
    engine = open_engine(path, "kv", "f16", device="cuda")
    sequence = engine.new_sequence()
    with pytest.raises(slimrt.ModelFormatError, match="the logits are NaN"):
        engine.append([(sequence, np.asarray([5], np.int32))], tokens=True)
    assert engine.length(sequence) == 0
    candidates = engine.append([(sequence, np.asarray([5], np.int32))], candidates=True).view(np.int32)
    (error,) = engine.sample_candidates(candidates, [_core.Sampler()])
    assert isinstance(error, slimrt.ModelFormatError) and "the logits are NaN" in str(error)


def test_a_text_without_chance_copies_no_logits(tiny):
    """The same text as with logprobs, which are made of logits; a sampler that changes these has them too."""
    with slimrt.Model(tiny, device="cuda", n_ctx=64) as model:

        def generate(**options) -> tuple[str, int]:
            before = bytes_down()
            made = model.generate("the cat sat", max_tokens=8, temperature=0.0, cache_prompt=False, **options)
            return made.text, bytes_down() - before

        row = 4 * model.n_vocab
        (text, few), (with_logprobs, many) = generate(), generate(logprobs=1)
        assert text == with_logprobs
        assert few < row
        assert many >= 8 * row
        assert generate(repeat_penalty=0.9)[1] >= 8 * row


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of enough tokens for candidates to be few."""
    path = write_random(tmp_path_factory.mktemp("wide") / "model.gguf", replace(MODEL, n_vocab=1500, n_ctx=320))
    with slimrt.Model(path, device="cuda", n_ctx=320, n_seqs=4) as model:
        yield model


SAMPLED = {
    "the defaults": {},
    "hot": {"temperature": 3.0, "top_k": 200, "top_p": 1.0, "min_p": 0.0},
    "filters": {"temperature": 1.5, "top_k": 60, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    "penalties": {"repeat_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.1, "top_p": 1.0},
    "bans": {"logit_bias": {3: -100.0, 8: float("-inf")}, "top_k": 5},
    "greedy with penalties": {"temperature": 0.0, "repeat_penalty": 1.4},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_texts_by_chance_copy_no_logits(wide, name):
    """The same tokens as with logprobs, which are made of whole rows; several texts in a step."""
    prompts = [list(range(n, n + 8)) for n in (3, 40, 900)]
    found = []
    for logprobs in (0, 1):
        before = bytes_down()
        made = wide.generate(
            prompts, max_tokens=10, seed=3, logprobs=logprobs, cache_prompt=False, ignore_eos=True, **SAMPLED[name]
        )
        found.append(([one.tokens for one in made], bytes_down() - before))
    (tokens, few), (with_logprobs, many) = found
    assert tokens == with_logprobs and len({*map(tuple, tokens)}) == 3
    assert few == 30 * 8 * 256 and many == 30 * 4 * wide.n_vocab


def test_one_text_that_needs_its_row_has_those_of_its_step_copied(wide):
    """The longer prompt has more tokens to penalise than a device finds candidates."""
    short, long = list(range(3, 11)), list(range(3, 300))
    found = []
    for prompts in ([short], [short, long]):
        before = bytes_down()
        made = wide.generate(
            prompts, max_tokens=4, seed=1, cache_prompt=False, ignore_eos=True, repeat_penalty=1.1, repeat_last_n=-1
        )
        found.append((made[0].tokens, bytes_down() - before))
    assert found[0][0] == found[1][0]
    assert [copied for _, copied in found] == [4 * 8 * 256, 8 * 4 * wide.n_vocab]


def test_masks_are_of_rows(wide):
    """Only tokens that a mask allows come, though others are likelier."""
    prompt, options = [5, 6, 7, 8], {"max_tokens": 6, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
    (likeliest, *_) = wide.generate(prompt, **options).tokens
    before = bytes_down()
    tokens = wide.generate(prompt, suppress_tokens=[likeliest], **options).tokens
    assert likeliest not in tokens
    assert bytes_down() - before == 6 * 4 * wide.n_vocab
