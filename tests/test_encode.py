# SPDX-License-Identifier: Apache-2.0
"""What the engine does with sources: what it takes and refuses, what is left after an exception, what it chooses."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import relative
from reference_seq2seq import Seq2Seq
from seq2seq_models import source, tokens
from slimrt import _core
from slimrt.errors import ContextOverflowError


@pytest.fixture
def gguf(seq2seq, convert):
    return lambda name: str(convert(seq2seq(name)))


def engine(path: str, **options) -> _core.Engine:
    return _core.Engine(path, **({"n_ctx": 32, "n_seqs": 2} | options))


def states(engine: _core.Engine, values: np.ndarray, **options) -> np.ndarray:
    return engine.encode([(engine.new_sequence(), values)], states=True, **options)[0]


def test_the_core_itself_chooses_x_and_e_and_what_the_file_says(gguf, tmp_path):
    path, made = gguf("whisper"), tmp_path / "made.gguf"
    info = engine(path).info()
    assert ({layer["mode"] for layer in info["layers"]}, info["cross"]["mode"]) == ({"x"}, "e")
    assert engine(path, cache="kv", sparse_threshold=0.01).info()["layers"][0]["mode"] == "kv"
    assert engine(path, sparse_threshold=0.01).info()["layers"][0]["mode"] == "kv"
    slimrt.convert(path, made, cache="kv", cross="kv", cross_type="q8", progress=False)
    info = engine(str(made)).info()
    assert (info["layers"][0]["mode"], info["cross"]["mode"], info["cross"]["type"]) == ("kv", "kv", "q8")
    # what a file says of one mode says nothing of another
    assert engine(str(made), cross="e").info()["cross"]["type"] == "f16"


def test_encoded_states_serve_again(gguf):
    """Sources that were encoded before, and embeddings in the place of ids."""
    for name in ("whisper", "t5"):
        one = engine(gguf(name), cross_type="f32")
        first = one.new_sequence()
        (made,) = one.encode([(first, source(name))], states=True)
        second = one.new_sequence()
        one.encode([(second, made)], encoded=True)
        prompt = np.array([3, 4, 5], np.int32)
        assert np.array_equal(one.append([(first, prompt)]), one.append([(second, prompt)]))


@pytest.mark.parametrize(
    ("name", "values", "options"),
    [
        ("t5", np.ones(4, np.float32), {}),
        ("t5", np.ones((4, 3), np.float32), {}),
        ("t5", np.ones(4, np.int64), {}),
        ("t5", np.ones(4, np.int32), {"encoded": True}),
        ("whisper", np.ones(4, np.int32), {}),
        ("whisper", np.ones(1600, np.float32), {}),
        ("whisper", np.ones((80, 100), np.float64), {}),
        ("moonshine", np.ones(16000, np.float32), {}),
    ],
)
def test_sources_of_another_kind_are_refused_and_never_rounded(name, values, options, gguf):
    with pytest.raises(ValueError, match="a source must be a float32 array"):
        states(engine(gguf(name)), values, **options)


GAPS = {  # positions of all but these of n rows
    "one": lambda n: [n // 2],
    "wide": lambda n: range(3, n - 2),
    "every other": lambda n: range(1, n, 2),
    "ends and runs": lambda n: [0, 1, 5, 6, 7, n - 3, n - 1],
    "none": lambda n: [],
}


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("name", ["t5", "t5_v11", "umt5", "bart", "m2m_100"])
def test_rows_at_positions_with_gaps_between(name, gaps, gguf):
    """States and logits are those of the reference: float32 beside float64, as elsewhere."""
    ids, path = source(name), gguf(name)
    at = np.delete(np.arange(len(ids), dtype=np.int32), list(GAPS[gaps](len(ids))))
    model, prompt = Seq2Seq(path), tokens(name)[:6]
    wanted = model.encode(ids[at], at)
    for cross in ("kv", "e"):
        one = engine(path, n_source=len(ids), cross=cross, cross_type="f32", cache="kv", cache_type_k="f32",
                     cache_type_v="f32")  # fmt: skip
        plain, sequence = one.new_sequence(), one.new_sequence()
        (got,) = one.encode([(sequence, ids[at], at)], states=True)
        assert relative(got, wanted) < 1e-5
        logits = one.append([(sequence, prompt)], all_logits=True)
        assert relative(logits, model.logits(prompt, wanted)) < 1e-5
        (without,) = one.encode([(plain, ids[at])], states=True)
        assert (relative(without, wanted) > 1e-3) == (gaps != "none")  # positions matter


def test_positions_of_a_batch_and_of_embeddings(gguf):
    """Sources of a call with more and fewer gaps do not mix; where they begin does not matter, nor a list of all."""
    path = gguf("t5")
    one, d = engine(path, n_seqs=8, n_source=64), 64
    rows = np.random.default_rng(3).normal(size=(20, d)).astype(np.float32)
    some = [np.arange(12), np.arange(0, 40, 2), np.arange(12), np.r_[0:5, 9:12, 60:64], np.arange(7, 19)]
    some = [at.astype(np.int32) for at in some]
    items = [(one.new_sequence(), rows[: len(at)], *([at] if i else [])) for i, at in enumerate(some)]
    got = one.encode(items, states=True)
    model = Seq2Seq(path)
    for states, at in zip(got, some, strict=True):
        assert relative(states, model.encode(rows[: len(at)].astype(np.float64), at)) < 1e-5
    np.testing.assert_array_equal(got[0], got[2])
    assert relative(got[4], got[0]) < 1e-6


def test_positions_that_cannot_be(gguf):
    one, ids = engine(gguf("t5"), n_source=16), np.arange(4, dtype=np.int32)
    for positions, error, why in [
        ([0, 1, 2], ValueError, "a source of 4 rows has 3 positions"),
        ([0, 2, 2, 3], ValueError, "positions must ascend .*row 2 is at 2"),
        ([-1, 0, 1, 2], ValueError, "positions must ascend .*row 0 is at -1"),
        ([0, 1, 2, 16], ContextOverflowError, "position 16, the last that there is room for is 15: .* raise n_source"),
    ]:
        with pytest.raises(error, match=why):
            one.encode([(one.new_sequence(), ids, np.array(positions, np.int32))])
    for positions in (np.arange(4), np.zeros(0, np.int32), np.zeros((4, 1), np.int32), [0, 1, 2, 3], None):
        with pytest.raises(ValueError, match="positions must be an int32 array"):
            one.encode([(0, ids, positions)])
    with pytest.raises(ValueError, match="yet to be encoded"):
        one.encode([(0, np.ones((4, 64), np.float32), ids)], encoded=True)
    other = engine(gguf("whisper"))
    with pytest.raises(ValueError, match="positions are for rows of tokens or embeddings"):
        other.encode([(other.new_sequence(), source("whisper"), np.arange(100, dtype=np.int32))])


def test_a_table_of_positions_is_not_advised_to_grow(gguf):
    """BART's has 40."""
    for n_source, advice in ((0, "cut the source$"), (16, "cut the source, or raise n_source$")):
        one = engine(gguf("bart"), n_source=n_source)
        with pytest.raises(ContextOverflowError, match=f"there is room for: {advice}"):
            one.encode([(one.new_sequence(), np.ones(41, np.int32))])


def test_an_exception_leaves_no_source(gguf):
    one = engine(gguf("t5"), n_source=16)
    sequences = [one.new_sequence(), one.new_sequence()]
    ids = np.arange(12, dtype=np.int32)

    def stop(done: int, total: int) -> None:
        if done >= 1:
            raise RuntimeError("enough")

    items = [(sequence, ids) for sequence in sequences]  # one after another: together they are longer than n_source
    with pytest.raises(RuntimeError, match="enough"):
        one.encode(items, on_progress=stop)
    for sequence in sequences:
        with pytest.raises(ValueError, match="has no source"):
            one.append([(sequence, ids[:2])])
    one.encode(items)
    assert one.append([(sequence, ids[:2]) for sequence in sequences]).shape[0] == 2
    with pytest.raises(ValueError, match="has a source or tokens already"):
        one.encode(items[:1])


@pytest.mark.parametrize("cross", ["kv", "e"])
@pytest.mark.parametrize("name", ["whisper", "umt5"])
def test_alignment_is_the_same_in_every_mode(name, cross, gguf):
    """Weights are positive and one in all; the sequence stays as it was."""
    one = engine(gguf(name), cross=cross, cross_type="f32", cache="kv", cache_type_k="f32", cache_type_v="f32")
    other = engine(gguf(name), cross="kv", cross_type="f32", cache="kv", cache_type_k="f32", cache_type_v="f32")
    prompt, heads, found = np.array([3, 4, 5, 6], np.int32), [(1, 0), (0, 1)], []
    for each in (one, other):
        sequence = each.new_sequence()
        each.encode([(sequence, source(name))])
        found.append(each.alignment(sequence, prompt, heads))
        assert each.length(sequence) == 0
    assert found[0].shape[:2] == (2, 4) and (found[0] > 0).all()
    np.testing.assert_allclose(found[0].sum(-1), 1, rtol=1e-5)
    assert relative(found[0], found[1]) < 1e-5
    with pytest.raises(ValueError, match="layer 0 has no head 99"):
        one.alignment(0, prompt, [(0, 99)])


def test_alignment_says_what_it_cannot_undo(gguf):
    """Its tokens made rows age, which then are forgotten, or would need blocks that forks have."""
    ids = np.arange(200, dtype=np.int32) % 25 + 3

    def of(levels: str, n: int) -> tuple[_core.Engine, int]:
        one = engine(gguf("t5"), cache="kivi", cache_type_k=levels, n_ctx=320, n_seqs=1)
        sequence = one.new_sequence()
        one.encode([(sequence, source("t5"))])
        one.append([(sequence, ids[:n])])
        return one, sequence

    one, sequence = of("none+f32*0.3", 150)
    with pytest.raises(ValueError, match="cannot truncate a sequence of 200 tokens to 150: rows .* are forgotten"):
        one.alignment(sequence, ids[150:], [(0, 0)])

    one, sequence = of("f32+sinks=4+recent=0", 33)
    copy, *others = (one.fork(sequence) for _ in range(3))
    for other in others:
        one.append([(other, ids[:1])])
    with pytest.raises(ContextOverflowError, match="1 free blocks of 32 tokens and 2 are needed"):
        one.alignment(copy, ids[33:36], [(0, 0)])
    assert one.length(copy) == 36


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["whisper", "umt5", "moonshine"])
def test_alignment_is_hugging_face_s(name, gguf, seq2seq):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    values, prompt, heads = source(name), np.array([3, 4, 5, 6], np.int32), [(1, 0), (0, 1)]
    theirs, given = {
        "whisper": (
            transformers.WhisperForConditionalGeneration,
            lambda: {"input_features": torch.tensor(values.T[None])},
        ),
        "moonshine": (
            transformers.MoonshineForConditionalGeneration,
            lambda: {"input_values": torch.tensor(values[None, :, 0])},
        ),
        "umt5": (transformers.UMT5ForConditionalGeneration, lambda: {"input_ids": torch.tensor(values[None]).long()}),
    }[name]
    model = theirs.from_pretrained(seq2seq(name), attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(**given(), decoder_input_ids=torch.tensor(prompt[None]).long(), output_attentions=True)
    one = engine(gguf(name), cross="e", cross_type="f32")
    sequence = one.new_sequence()
    one.encode([(sequence, values)])
    found = one.alignment(sequence, prompt, heads)
    for weights, (layer, head) in zip(found, heads, strict=True):
        assert np.abs(weights - out.cross_attentions[layer][0, head].numpy()).max() < 1e-5
