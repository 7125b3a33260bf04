# SPDX-License-Identifier: Apache-2.0
"""Sessions and their files, scores."""

from __future__ import annotations

import json
import pickle
import shutil
from unittest.mock import Mock

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, GREEDY, PROMPT, relative
from slimrt.generation.loop import loop_of
from tiny_model import BOS, FIRST_BYTE


def test_session_logits_are_the_model_s(tiny):
    with slimrt.Model(tiny, n_ctx=64, cache_type="f32") as model, model.session() as session:
        ids = model.tokenize("the cat sat on the mat")
        whole = model.logits(ids)
        assert whole.shape == (len(ids), model.n_vocab) and whole.dtype == np.float32
        parts = np.concatenate([session.append(ids[:5]), session.append(ids[5:6]), session.append(ids[6:])])
        assert relative(parts, whole) < 1e-4
        assert session.tokens == tuple(ids) and session.length == len(ids)
        session.truncate(5)
        assert relative(session.append(ids[5:], last_only=True), whole[-1:]) < 1e-4


def test_forks_are_independent(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model, model.session() as one:
        one.append(model.tokenize("the cat"))
        with one.fork() as other:
            other.append(model.tokenize(" sat", add_special_tokens=False))
            assert other.length > one.length
            assert other.tokens[: one.length] == one.tokens
            again = one.append([7])
        one.truncate(one.length - 1)
        assert np.array_equal(one.append([7]), again)


def test_sessions_that_are_dropped_give_their_rows_back(tiny):
    with slimrt.Model(tiny, n_ctx=64) as model:
        for _ in range(5):
            model.session().append([BOS] * 64)


def test_generate_reuses_what_a_session_holds(model):
    with model.session() as session:
        first = model.generate(PROMPT, max_tokens=6, session=session, **GREEDY)
        ids = [*model.tokenize(PROMPT), *first.tokens]
        assert session.tokens == tuple(ids[:-1])
        longer = [*ids, 9, 9]
        second = model.generate(longer, max_tokens=6, session=session, **GREEDY)
        assert second.usage.cached_tokens == len(ids) - 1
        assert second.tokens == model.generate(longer, max_tokens=6, **GREEDY).tokens
        other = model.generate([*ids[:4], 8], max_tokens=2, session=session, **GREEDY)
        assert other.usage.cached_tokens == 4
        again = model.generate([*ids[:4], 8], max_tokens=2, session=session, **GREEDY)
        assert again.tokens == other.tokens and again.usage.cached_tokens == 4
        with pytest.raises(ValueError, match="one prompt"):
            model.generate(["a", "b"], session=session)


def test_session_file(tiny, tmp_path):
    file = tmp_path / "s.session"
    with slimrt.Model(tiny, n_ctx=64) as model:
        session = model.session()
        session.append(model.tokenize(PROMPT))
        session.save(file)
        expected = session.append([9])
    assert [path.name for path in tmp_path.iterdir()] == ["s.session"]
    with slimrt.Model(tiny, n_ctx=32) as model:
        loaded = model.load_session(file)
        assert loaded.tokens == tuple(model.tokenize(PROMPT))
        assert np.array_equal(loaded.append([9]), expected)


def test_a_session_replaces_a_session_and_no_other_file(tiny, tmp_path):
    """It replaced any, a text or the model itself, and said nothing."""
    model_file, text, saved = shutil.copy(tiny, tmp_path / "m.gguf"), tmp_path / "notes.txt", tmp_path / "s"
    text.write_text("mine")
    saved.touch()  # as mktemp does
    with slimrt.Model(model_file, n_ctx=64) as model, model.session() as session:
        for n in (1, 2):
            session.append([BOS])
            session.save(saved)
            assert model.load_session(saved).length == n
        with pytest.raises(FileExistsError, match="notes.txt would be replaced, and is no session: name another"):
            session.save(text)
        with pytest.raises(ValueError, match="the session would replace the model"):
            session.save(model_file, overwrite=True)
        assert text.read_text() == "mine"
        model_file.unlink()
        session.save(text, overwrite=True)
        assert model.load_session(text).length == 2


def test_session_files_that_do_not_belong(tiny, grouped, tmp_path):
    file = tmp_path / "s.session"
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        session.append([BOS] * 40)
        session.save(file)
    with slimrt.Model(grouped) as other, pytest.raises(slimrt.ModelFormatError, match="another model"):
        other.load_session(file)
    with slimrt.Model(tiny, cache_type="f32") as other, pytest.raises(slimrt.ModelFormatError, match="another cache"):
        other.load_session(file)
    with slimrt.Model(tiny, n_ctx=32) as small, pytest.raises(slimrt.ContextOverflowError, match="has 40 tokens"):
        small.load_session(file)


def test_damaged_session_files(tiny, tmp_path):
    file, data = tmp_path / "s.session", tmp_path / "bad.session"
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        session.append([BOS] * 4)
        session.save(file)
        good = file.read_bytes()
        later = good.replace(b'"version": 2', b'"version": 7')
        older = good.replace(b'"version": 2', b'"version": 1')
        swapped = good.replace(b'"tokens": [1, 1, 1, 1]', b'"tokens": [1, 1, 1,-1]')
        for bad, words in (
            (b"", "not a slimrt session file"),
            (good[:7], "not a slimrt session file"),
            (b"GGUF" + good[4:], "not a slimrt session file"),
            (good[:100], "header of this session file is broken"),
            (good[:-1], "cut off"),
            (good + b"x", f"damaged: {len(good) + 1} bytes, not {len(good)}"),
            (later, "session format 7"),
            (older, "session format 1"),
            (swapped, "its checksum is another"),
        ):
            data.write_bytes(bad)
            with pytest.raises(slimrt.ModelFormatError, match=words):
                model.load_session(data)
        with pytest.raises(FileNotFoundError, match="none"):
            model.load_session(tmp_path / "none")
        with pytest.raises(FileNotFoundError, match="none: no such directory"):
            session.save(tmp_path / "none" / "s")


def test_any_flipped_byte_of_a_session_file_is_refused(tiny, tmp_path):
    """In its header (other tokens over the old rows) and in its rows (other logits) alike."""
    file, data = tmp_path / "s.session", tmp_path / "bad.session"
    rng = np.random.default_rng(0)
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        session.append([BOS] * 4)
        session.save(file)
        good = np.fromfile(file, np.uint8)
        for at in (*range(0, 400, 3), *rng.integers(0, good.size, 100), good.size - 1):
            bad = good.copy()
            bad[at] ^= 1 << int(rng.integers(8))
            bad.tofile(data)
            with pytest.raises(slimrt.ModelFormatError, match="not a slimrt session|header .* is broken|checksum"):
                model.load_session(data)


@pytest.mark.parametrize(
    "header", [b'{"version": Infinity, "bytes": 1}', b"[" * 200_000, b'{"bytes": -1}', b"[[1, 2]]"]
)
def test_session_headers_that_are_no_headers(tiny, tmp_path, header):
    file = tmp_path / "bad.session"
    file.write_bytes(b"SLIMRTSE" + len(header).to_bytes(8, "little") + header)
    with slimrt.Model(tiny, n_ctx=64) as model, pytest.raises(slimrt.ModelFormatError, match="bad.session"):
        model.load_session(file)


def test_a_session_under_other_rotary_frequencies_is_refused(convert, tmp_path):
    """longrope has short and long factors and chooses by n_ctx: rows of one mean nothing beside the other."""
    path = convert(GOLDEN / "phi3")
    file = tmp_path / "s.session"
    with slimrt.Model(path, n_ctx=48) as model, model.session() as session:
        session.append([5, 6, 7])
        session.save(file)
        expected = session.append([9])
    with slimrt.Model(path, n_ctx=40) as model:
        assert np.array_equal(model.load_session(file).append([9]), expected)
    with slimrt.Model(path, n_ctx=96) as other, pytest.raises(slimrt.ModelFormatError, match="rotary .*n_ctx"):
        other.load_session(file)


def test_a_session_is_of_the_file_that_was_opened(tiny, grouped, tmp_path):
    """Not of another that took its name since: its fingerprint and its tokenizer."""
    path, file = tmp_path / "m.gguf", tmp_path / "s.session"
    shutil.copy(tiny, path)
    with slimrt.Model(path, n_ctx=64) as model, slimrt.Model(tiny, n_ctx=64) as same, model.session() as session:
        shutil.copy(grouped, tmp_path / "other")
        (tmp_path / "other").replace(path)
        assert model.tokenize(PROMPT) == same.tokenize(PROMPT)
        session.append([BOS] * 4)
        session.save(file)
        assert same.load_session(file).length == 4
        with slimrt.Model(path, n_ctx=64) as replaced, pytest.raises(slimrt.ModelFormatError, match="another model"):
            replaced.load_session(file)


def test_what_is_closed_is_not_entered(tiny):
    model = slimrt.Model(tiny, n_ctx=64)
    session = model.session()
    for one in (session, model):
        one.close()
        with pytest.raises(ValueError, match="<slimrt.* is closed"), one:
            pass
    assert model.closed and session.closed


def test_closed(tiny):
    model = slimrt.Model(tiny, n_ctx=64)
    session, stream = model.session(), model.stream(PROMPT)
    session.close()
    with pytest.raises(ValueError, match="session is closed"):
        session.append([BOS])
    model.close()
    model.close()
    for use in (lambda: model.generate(PROMPT), lambda: model.logits([BOS]), lambda: next(stream), model.session):
        with pytest.raises(ValueError, match="model is closed"):
            use()


def test_rows_behind_a_window_find_room_again_where_prefixes_wait_for_a_use(convert, tmp_path):
    """To fork and to save computes what a window has given back, as to append does."""
    ids = np.random.default_rng(0).integers(3, 100, 150).tolist()
    with slimrt.Model(convert(GOLDEN / "mistral_window"), n_ctx=160, n_batch=32, n_seqs=2) as model:
        for use in (slimrt.Session.fork, lambda session: session.save(tmp_path / "s.session")):
            with model.session() as session:
                session.append(ids, last_only=True)
                session.truncate(60)
                for first in range(3, 15):
                    model.generate([first, *ids[:100]], max_tokens=2, cache_prompt=True, **GREEDY)
                use(session)
                assert relative(session.append([5], last_only=True), model.logits([*ids[:60], 5])[-1:]) < 1e-2


# ---------------------------------------------------------------- texts that go on in one
def test_a_text_that_goes_on_in_a_session_has_it_for_itself(tiny):
    """Else its next token would follow what another one has put there."""
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model, model.session() as session:
        alone = model.generate(PROMPT, max_tokens=9, **GREEDY).text
        stream = model.stream(PROMPT, session=session, max_tokens=9, **GREEDY)
        text = next(stream)
        for change in (
            lambda: session.append([9]),
            lambda: session.truncate(2),
            lambda: model.generate("a dog", session=session, max_tokens=2),
            lambda: next(model.stream("a dog", session=session, max_tokens=2)),
        ):
            with pytest.raises(ValueError, match="a text goes on in this session"):
                change()
        assert session.fork().append([9]).shape == (1, model.n_vocab)
        assert text + "".join(stream) == alone
        assert session.append([9]).shape == (1, model.n_vocab)


def test_a_stream_that_is_left_gives_its_session_back(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model, model.session() as session:
        for leave in (slimrt.Stream.close, lambda stream: None):
            stream = model.stream(PROMPT, session=session, **GREEDY)
            next(stream)
            leave(stream)
            del stream
            session.truncate(session.length - 1)
            assert model.generate(PROMPT, session=session, max_tokens=2, **GREEDY).usage.cached_tokens > 0
        with pytest.raises(KeyError):
            model.generate(PROMPT, session=session, on_progress=lambda *_: {}["stop"])
        assert session.append([9]).shape == (1, model.n_vocab)


@pytest.mark.parametrize("begin", [slimrt.Model.stream, slimrt.Model.generate])
@pytest.mark.parametrize("strikes", ["on_progress", "logits_processor"])
def test_a_second_ctrl_c_gives_a_session_back_too(tiny, begin, strikes):
    """One that strikes while the first one, in a step or in a task, waits for what another thread does."""
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        loop = loop_of(model._runtime)

        def interrupt(*_):
            loop._engine.alone = Mock(side_effect=KeyboardInterrupt)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            next(begin(model, PROMPT, session=session, **{strikes: interrupt}, **GREEDY))
        del loop._engine.alone
        assert session.append([9]).shape == (1, model.n_vocab)
        assert (loop.running, loop.waiting) == (0, 0)


def test_a_closed_session_ends_its_text_and_no_other(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as model:
        alone = model.generate(PROMPT, max_tokens=9, **GREEDY).text
        session = model.session()
        streams = [model.stream(PROMPT, session=one, max_tokens=9, **GREEDY) for one in (session, None)]
        begun = [next(stream) for stream in streams]
        session.close()
        loop_of(model._runtime).wait([stream._ticket for stream in streams], lambda: False)  # in the same steps
        assert begun[1] + "".join(streams[1]) == alone
        with pytest.raises(ValueError, match="the session is closed"):
            next(streams[0])


def test_a_cut_that_finds_no_room_changes_nothing(convert):
    """Rows that have aged are copied where forks share the blocks to which they come back."""
    options = {"cache": "lowrank:q2@0.5+q4*0.1+sinks=4", "calibration": "none", "allow_lossy": True}
    ids = np.random.default_rng(0).integers(3, 100, 500).tolist()
    with slimrt.Model(convert(GOLDEN / "llama_gqa_tied"), n_ctx=512, **options) as model, model.session() as session:
        session.append(ids, last_only=True)
        forks = [session.fork() for _ in range(4)]
        cut = []
        with pytest.raises(slimrt.ContextOverflowError, match="free blocks"):
            for fork in forks:
                fork.truncate(480)
                cut.append(fork)
        assert [fork.length for fork in forks] == [480] * len(cut) + [500] * (4 - len(cut))
        for fork in cut:
            fork.close()
        forks[-1].truncate(480)
        assert forks[-1].tokens == tuple(ids[:480])
        assert forks[-1].append([9], last_only=True).shape == (1, model.n_vocab)


def test_a_session_has_rows_of_its_own(model):
    with model.session() as session, pytest.raises(ValueError, match="cache_prompt does not go with session"):
        model.generate(PROMPT, session=session, cache_prompt=True, max_tokens=1)


# ---------------------------------------------------------------- score
def test_score(model):
    score = model.score(PROMPT)
    ids = model.tokenize(PROMPT)
    logits = model.logits(ids)[:-1].astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[range(len(ids) - 1), ids[1:]]
    assert score.tokens == tuple(ids) and score.logprobs.dtype == np.float32
    assert np.allclose(score.logprobs, expected, atol=1e-4)
    assert score.log_likelihood == pytest.approx(expected.sum(), rel=1e-4)
    assert score.perplexity == pytest.approx(model.perplexity(PROMPT), rel=1e-5)
    with pytest.raises(ValueError, match="two tokens"):
        model.score([BOS])
    with pytest.raises(slimrt.ContextOverflowError, match="text has 65 tokens, the context holds 64"):
        model.score([BOS] * 65)


def test_a_score_is_a_record(model):
    score = model.score(PROMPT)
    assert score == pickle.loads(pickle.dumps(score)) and score != model.score("a dog") and score != 1.0
    assert len({score, model.score(PROMPT)}) == 1
    assert json.loads(json.dumps(score.to_dict())) == {
        "tokens": list(score.tokens), "logprobs": score.logprobs.tolist(),
        "log_likelihood": score.log_likelihood, "perplexity": score.perplexity,
    }  # fmt: skip


def test_perplexity_of_a_long_text(tiny):
    """Windows of n_ctx: each token is scored once, with what stands before it in its window."""
    ids = [BOS, *np.random.default_rng(0).integers(FIRST_BYTE, FIRST_BYTE + 256, 99).tolist()]
    with slimrt.Model(tiny, n_ctx=32, cache_type="f32", n_batch=32) as model:
        total, scored, end = 0.0, 1, 32
        while scored < len(ids):
            total += model.score(ids[end - 32 : end]).logprobs[scored - end :].sum(dtype=np.float64)
            scored, end = end, min(end + 10, len(ids))
        assert model.perplexity(ids, stride=10) == pytest.approx(np.exp(-total / 99), rel=1e-4)
        for stride in (0, 32):
            with pytest.raises(ValueError, match="stride"):
                model.perplexity(ids, stride=stride)
