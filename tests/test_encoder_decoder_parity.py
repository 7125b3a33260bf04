# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders in the engine agree with Hugging Face in float32: encoder states, a prompt, cached steps, beams.

The goldens are committed (seq2seq_models.py); that they are right is test_convert_seq2seq.py's part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slimrt
from beams import beam_search
from conftest import relative, third_party
from reference_seq2seq import Seq2Seq
from seq2seq_models import BOLT, MODELS, N_BEAMS, N_DECODE, N_PROMPT, committed, decode, patches, source, tokens
from slimrt import _core
from slimrt.errors import CacheUnsupportedError

PARITY = 1e-4  # of float32 engines, relative to the largest value
REFERENCE = 1e-5  # of float64 against float32
F32 = {"cache_type_k": "f32", "cache_type_v": "f32", "cross_type": "f32"}
CROSS = ("kv", "e")
SELF = ("kv", "x")
each = pytest.mark.parametrize("name", MODELS)
searched = pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if not tiny.fixture])


@pytest.fixture
def opened(seq2seq, convert):
    """opened(name, **options) -> a native engine of a model of seq2seq_models."""

    def engine(name: str, **options):
        return _core.Engine(
            str(convert(seq2seq(name))), **({"n_ctx": 32, "cross": "kv", "cache": "kv"} | F32 | options)
        )

    return engine


def read(engine, name: str, **options) -> int:
    """A new sequence with the golden's source."""
    sequence = engine.new_sequence()
    engine.encode([(sequence, source(name))], **options)
    return sequence


# ---------------------------------------------------------------- against Hugging Face
@each
def test_encoder_states(name, opened):
    engine = opened(name)
    (states,) = engine.encode([(engine.new_sequence(), source(name))], states=True)
    assert states.dtype == np.float32 and relative(states, committed(name)["states"]) < PARITY


@each
@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("mode", SELF)
def test_a_prompt_and_cached_steps(mode, cross, name, opened):
    """In every mode that needs no fold (those that do: test_encoder_decoder_modes.py)."""
    if MODELS[name].family == "moonshine" and mode == "x":
        with pytest.raises(CacheUnsupportedError, match="rotated by position"):
            opened(name, cache=mode, cross=cross)
        return
    engine = opened(name, cache=mode, cross=cross)
    got = decode(engine, read(engine, name), tokens(name))
    assert relative(got, committed(name)["logits"]) < PARITY


@each
def test_greedy(name, opened):
    engine = opened(name, cross="e")
    sequence, ids = read(engine, name), [int(tokens(name)[0])]
    for _ in range(N_DECODE):
        ids.append(int(engine.append([(sequence, np.array(ids[-1:], np.int32))])[0].argmax()))
    assert ids[1:] == committed(name)["greedy"].tolist()


def end_of(name: str) -> int:
    return 1 if MODELS[name].family in ("t5", "mt5", "umt5") else 2


@searched
def test_the_search_itself(name, seq2seq, convert):
    """On the float64 reference: the best beam is Hugging Face's."""
    model, wanted = Seq2Seq(convert(seq2seq(name))), committed(name)
    states, beams = model.encode(source(name)), [[]]

    def advance(parents: list[int], new: list[int]) -> np.ndarray:
        nonlocal beams
        beams = [[*beams[parent], token] for parent, token in zip(parents, new, strict=True)]
        return np.stack([model.logits(np.array(beam), states)[-1] for beam in beams])

    found, score = beam_search(advance, int(tokens(name)[0]), end_of(name), N_BEAMS, N_DECODE)
    assert found == wanted["beams"].tolist() and score == pytest.approx(wanted["score"], abs=REFERENCE)


@searched
@pytest.mark.parametrize("cross", ["kv", "e"])
def test_beams_fork_what_they_have_read(cross, name, opened):
    """Beams share the source and their common rows."""
    engine, wanted = opened(name, cross=cross, n_seqs=2 * N_BEAMS + 1), committed(name)
    held = [read(engine, name)]

    def advance(parents: list[int], new: list[int]) -> np.ndarray:
        nonlocal held
        forked = [engine.fork(held[parent]) for parent in parents]
        for sequence in held:
            engine.free_sequence(sequence)
        held = forked
        steps = [(sequence, np.array([token], np.int32)) for sequence, token in zip(held, new, strict=True)]
        return engine.append(steps)

    found, score = beam_search(advance, int(tokens(name)[0]), end_of(name), N_BEAMS, N_DECODE)
    assert found == wanted["beams"].tolist() and score == pytest.approx(wanted["score"], abs=PARITY)


def test_chronos_bolt(convert):
    wanted = committed("chronos_bolt")
    engine = _core.Engine(str(convert(third_party(BOLT))), n_ctx=32, cross="e", **F32)
    sequence = engine.new_sequence()
    (states,) = engine.encode([(sequence, patches())], states=True)
    assert relative(states, wanted["states"]) < PARITY
    decoded = engine.append([(sequence, np.zeros(1, np.int32))], states=True)
    assert relative(decoded, wanted["decoded"]) < PARITY


# ---------------------------------------------------------------- against itself
def sources(name: str) -> list[np.ndarray]:
    """Three of different content and, where the model allows it, length."""
    whole = source(name)
    if MODELS[name].family == "whisper":
        return [whole, whole[::-1].copy(), 0.5 * whole]
    return [whole, whole[: len(whole) * 2 // 3].copy(), whole[::-1].copy()]


@each
@pytest.mark.parametrize("cross", ["kv", "e"])
def test_a_batch_is_as_one_by_one(cross, name, opened):
    engine, ids = opened(name, cross=cross, n_seqs=3), tokens(name)
    alone, states = [], []
    for one in sources(name):
        sequence = engine.new_sequence()
        states += engine.encode([(sequence, one)], states=True)
        alone.append(decode(engine, sequence, ids))
        engine.free_sequence(sequence)
    held = [engine.new_sequence() for _ in range(3)]
    together = engine.encode(list(zip(held, sources(name), strict=True)), states=True)
    assert all(relative(got, wanted) < PARITY for got, wanted in zip(together, states, strict=True))
    prompts = engine.append([(sequence, ids[:N_PROMPT]) for sequence in held], all_logits=True)
    rows = [prompts.reshape(3, N_PROMPT, -1)]
    for at in range(N_PROMPT, len(ids)):
        rows.append(engine.append([(sequence, ids[at : at + 1]) for sequence in held])[:, None])
    for got, wanted in zip(np.concatenate(rows, axis=1), alone, strict=True):
        assert relative(got, wanted) < PARITY


@each
@pytest.mark.parametrize("mode", SELF)
def test_e_is_kv_to_1e_5(mode, name, opened):
    if MODELS[name].family == "moonshine" and mode == "x":
        pytest.skip("rotary positions: x is not legal")
    rows = {}
    for cross in ("kv", "e"):
        engine = opened(name, cache=mode, cross=cross)
        rows[cross] = decode(engine, read(engine, name), tokens(name))
    assert relative(rows["e"], rows["kv"]) < 1e-5


@each
def test_truncate_and_fork_keep_the_source(name, opened):
    engine, ids = opened(name, n_seqs=2), tokens(name)
    sequence = read(engine, name)
    wanted = decode(engine, sequence, ids)
    other = engine.fork(sequence)
    for one in (sequence, other):
        engine.truncate(one, 0)
        assert relative(decode(engine, one, ids), wanted) < PARITY


def test_a_sequence_must_have_read_something(opened):
    engine = opened("t5")
    sequence = engine.new_sequence()
    with pytest.raises(ValueError, match="has no source: encode one first"):
        engine.append([(sequence, tokens("t5")[:1])])
    engine.encode([(sequence, source("t5"))])
    engine.append([(sequence, tokens("t5")[:1])])
    with pytest.raises(ValueError, match="has a source or tokens already"):
        engine.encode([(sequence, source("t5"))])


WRONG = {
    "mel frames of another width": ("whisper", np.zeros((100, 81), np.float32), r"\[rows, 80\]"),
    "too many frames": ("whisper", np.zeros((102, 80), np.float32), "102 rows gives 51"),
    "ids where frames should be": ("whisper", np.zeros(4, np.int32), r"float32 array \[rows, 80\]"),
    "frames where ids should be": ("t5", np.zeros((4, 80), np.float32), r"\[rows, 64\]"),
    "an id past the vocabulary": ("t5", np.array([101], np.int32), "token 101 is outside the vocabulary"),
    "nothing": ("t5", np.zeros(0, np.int32), "0 rows is too short"),
    "less audio than one row": ("moonshine", np.zeros((100, 1), np.float32), "100 rows is too short"),
}


@pytest.mark.parametrize("case", WRONG)
def test_sources_that_do_not_fit(case, opened):
    name, wrong, reason = WRONG[case]
    engine = opened(name)
    sequence = engine.new_sequence()
    with pytest.raises((ValueError, slimrt.ContextOverflowError), match=reason):
        engine.encode([(sequence, wrong)])
    engine.encode([(sequence, source(name))])  # it is as it was
    assert len(engine.append([(sequence, tokens(name)[:1])])) == 1


@each
def test_info(name, opened, convert, seq2seq):
    info = opened(name, cross="e", cross_type="f16").info()
    family = MODELS[name].family
    inputs = {"whisper": "mel", "moonshine": "audio"}.get(family, "tokens")
    assert info["encoder"]["inputs"] == inputs and info["cross"]["mode"] == "e" and info["cross"]["type"] == "f16"
    model = Seq2Seq(convert(seq2seq(name)))
    assert info["encoder"]["n_layers"] == model.key("block_count")
    assert info["n_layers"] == model.key("decoder_block_count")
    assert info["decoder_start_token_id"] == tokens(name)[0]
    assert info["cross"]["bytes_per_row"] == 2 * model.key("embedding_length")  # one E for all layers


def test_files_of_llama_cpp_may_leave_keys_out(seq2seq, convert, opened, tmp_path: Path):
    """relative_max_distance always, decoder_block_count where it is the encoder's; it also writes another epsilon."""
    from slimrt.modelfile.gguf import ModelData, read_gguf, write_gguf

    wanted = opened("t5")
    model = read_gguf(convert(seq2seq("t5")))
    missing = ("t5.attention.relative_max_distance", "t5.vocab_size", "t5.attention.head_count_kv", "slimrt.activation")
    kept = {key: value for key, value in model.metadata.items() if key not in missing}
    kept["t5.attention.layer_norm_epsilon"] = kept["t5.attention.layer_norm_rms_epsilon"]
    write_gguf(tmp_path / "model.gguf", ModelData(kept, model.tensors), show_progress=False)
    engine = _core.Engine(str(tmp_path / "model.gguf"), n_ctx=32, cache="kv", cross="kv", **F32)
    got, own = (decode(one, read(one, "t5"), tokens("t5")) for one in (engine, wanted))
    assert np.array_equal(got, own)
