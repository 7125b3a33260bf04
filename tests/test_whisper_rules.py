# SPDX-License-Identifier: Apache-2.0
"""Whisper's rules for the next token, cutting into segments, and words: on tokens alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripted import (
    DE,
    EN,
    END,
    N_VOCAB,
    NO_SPEECH,
    NO_TIMES,
    PREVIOUS,
    START,
    TIME,
    TRANSCRIBE,
    TRANSLATE,
    at,
    joint,
    said,
    whisper_fields,
    whisper_tokenizer,
)  # fmt: skip
from slimrt.errors import UnsupportedError
from slimrt.speech.records import Word
from slimrt.speech.rules import WhisperRules, compression_ratio, pieces
from slimrt.speech.vocabulary import WhisperTokens
from slimrt.speech.words import Spoken, median_filter, merge_punctuation, split_words, spoken_words, token_times, warp
from slimrt.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.fixture(scope="module")
def tokens() -> WhisperTokens:
    return WhisperTokens.of(whisper_tokenizer(), N_VOCAB)


def allowed(rules: WhisperRules, so_far: list[int], row: np.ndarray | None = None) -> set[int]:
    row = np.zeros(N_VOCAB, np.float32) if row is None else row.copy()
    if row.max() == 0:
        row[:TIME] = 30.0  # text likelier than all times together
    rules(row, so_far)
    return set(np.flatnonzero(np.isfinite(row)).tolist())


def test_special_tokens_are_found_by_name(tokens):
    assert (tokens.end, tokens.start, tokens.previous, tokens.no_speech) == (END, START, PREVIOUS, NO_SPEECH)
    assert (tokens.no_timestamps, tokens.timestamps) == (NO_TIMES, TIME)
    assert tokens.languages == {"en": EN, "de": DE} and tokens.tasks == {
        "transcribe": TRANSCRIBE,
        "translate": TRANSLATE,
    }
    assert tokens.instructions("de", "translate", True) == [DE, TRANSLATE]
    assert tokens.instructions("en", "transcribe", False) == [EN, TRANSCRIBE, NO_TIMES]
    assert tokens.text([at(0), *said("hi"), at(1), END]) == "hi"


def test_what_the_model_lacks_is_said(tokens):
    with pytest.raises(ValueError, match="language 'eng' is not supported .did you mean 'en'"):
        tokens.check("eng", "transcribe")
    with pytest.raises(UnsupportedError, match="^language 'fr' is none that this model knows: en, de"):
        tokens.check("fr", "transcribe")
    with pytest.raises(ValueError, match="task 'transcript'"):
        tokens.check("en", "transcript")


def test_another_vocabulary_is_refused():
    fields = {"general.architecture": "whisper"} | whisper_fields()
    names = [name.replace("<|startoftranscript|>", "<|begin|>") for name in fields["tokenizer.ggml.tokens"]]
    with pytest.raises(UnsupportedError, match="no <.startoftranscript.>"):
        WhisperTokens.of(Tokenizer.from_gguf_fields(fields | {"tokenizer.ggml.tokens": names}), N_VOCAB)


def test_the_first_token_is_a_time_of_at_most_a_second(tokens):
    rules = WhisperRules(tokens, N_VOCAB, timestamps=True)
    assert allowed(rules, []) == set(range(TIME, TIME + 51))
    assert allowed(WhisperRules(tokens, N_VOCAB, timestamps=True, max_initial=None), []) == set(range(TIME, N_VOCAB))


def test_times_come_in_pairs(tokens):
    rules = WhisperRules(tokens, N_VOCAB, timestamps=True)
    text, end = set(range(257)), {END}
    assert allowed(rules, [at(0)]) == text | end  # a segment has begun
    assert allowed(rules, [at(0), *said("a"), at(2)]) == end | set(range(at(2), N_VOCAB))  # it has ended: the next one
    assert allowed(rules, [at(0), *said("a"), at(2), at(2)]) == text | end
    later = set(range(at(2) + 1, N_VOCAB))  # a segment has a length
    assert allowed(rules, [at(0), *said("a"), at(2), at(2), *said("b")]) == text | end | later


def test_a_time_comes_where_all_of_them_are_likelier_than_any_text(tokens):
    rules = WhisperRules(tokens, N_VOCAB, timestamps=True)
    so_far = [at(0), *said("a")]
    row = np.full(N_VOCAB, -100.0, np.float32)
    row[ord("b")] = 1.0
    row[at(1) : at(1) + 4] = 1 + np.log(0.2)  # 0.8 in all
    assert ord("b") in allowed(rules, so_far, row)
    row[at(1) : at(1) + 6] = 1 + np.log(0.2)  # 1.2
    assert allowed(rules, so_far, row) == set(range(at(0) + 1, N_VOCAB))


def test_suppressed_tokens_and_controls_never_come(tokens):
    rules = WhisperRules(tokens, N_VOCAB, timestamps=False, suppress=[ord("#"), -1], begin_suppress=[ord(" "), END])
    assert allowed(rules, []) == set(range(257)) - {ord("#"), ord(" ")}
    assert allowed(rules, said("a")) == set(range(258)) - {ord("#")}


@pytest.mark.parametrize("timestamps", [True, False])
def test_a_mask_and_joint_times_leave_what_the_rules_leave(tokens, timestamps):
    rules = WhisperRules(tokens, N_VOCAB, timestamps=timestamps, suppress=[ord("#")])
    rng, times = np.random.default_rng(0), 0
    for _ in range(400):
        row = rng.normal(size=N_VOCAB).astype(np.float32) * 3
        row[:TIME] += rng.choice([0, 2, 6])
        so_far = [int(rng.integers(TIME, N_VOCAB) if rng.random() < 0.5 else rng.integers(0, 256)) for _ in range(4)]
        so_far = sorted(so_far[: rng.integers(0, 5)]) if rng.random() < 0.5 else so_far
        left = joint(row, *rules.may(so_far))
        rules(row, so_far)
        np.testing.assert_array_equal(row, left, str(so_far))
        times += timestamps and np.isinf(row[:TIME]).all()
    assert (10 < times < 390) == timestamps


@pytest.mark.oracle
def test_rules_are_those_of_hugging_face(tokens):
    """On random texts: the same tokens are allowed. Theirs leaves controls alone, which are left out here."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    generation = pytest.importorskip("transformers").GenerationConfig(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=50
    )
    theirs = process.WhisperTimeStampLogitsProcessor(generation, begin_index=3)
    ours = WhisperRules(tokens, N_VOCAB, timestamps=True)
    rng = np.random.default_rng(0)
    kept = np.array([id for id in range(N_VOCAB) if not END < id < TIME])
    for _ in range(300):
        row = rng.normal(size=N_VOCAB).astype(np.float32) * 3
        row[END + 1 : TIME] = -np.inf
        row[:TIME] += rng.choice([0, 6])
        so_far, last = [], TIME
        for _ in range(int(rng.integers(0, 7))):
            if rng.random() < 0.5:
                last = int(rng.integers(last, min(last + 60, N_VOCAB)))
                so_far.append(last)
            else:
                so_far.append(int(rng.integers(0, 256)))
        wanted = theirs(torch.tensor([[START, EN, TRANSCRIBE, *so_far]]), torch.tensor(row)[None])[0].numpy()
        ours(row, so_far)
        np.testing.assert_array_equal(np.isfinite(row[kept]), np.isfinite(wanted[kept]), str(so_far))


def test_pieces():
    a, b = said("a"), said("b")
    whole = [at(0), *a, at(1.5)]
    assert pieces(whole, TIME, 3000) == ([(0.0, 1.5, whole)], 3000)  # one segment, nothing after it
    assert pieces([at(0.3), *a], TIME, 700) == ([(pytest.approx(0.3), 7.0, [at(0.3), *a])], 700)
    assert pieces(a, TIME, 700) == ([(0.0, 7.0, a)], 700)
    assert pieces(a, None, 700) == ([(0.0, 7.0, a)], 700)
    assert pieces([], TIME, 700) == ([(0.0, 7.0, [])], 700)
    two = [at(0), *a, at(1.5), at(2), *b, at(4)]
    assert pieces(two, TIME, 3000) == ([(0.0, 1.5, two[:3]), (2.0, 4.0, two[3:])], 3000)
    cut = [at(0), *a, at(1.5), at(2), *b]  # the second one was cut off: the next window begins with it
    assert pieces(cut, TIME, 3000) == ([(0.0, 1.5, cut[:3])], 150)
    late = [at(0), *a, at(1.5), at(2), *b]  # of a window that is shorter than what is told of it
    assert pieces(late, TIME, 50, whole=True) == ([(0.0, 1.5, late[:3]), (2.0, 2.0, late[3:])], 50)
    more = [*two, at(4)]
    assert pieces(more, TIME, 3000) == ([(0.0, 1.5, two[:3]), (2.0, 4.0, two[3:])], 400)


def test_compression_ratio():
    assert compression_ratio("all sorts of things are said here, once each") < 1.2
    assert compression_ratio("again and " * 40) > 2.4


def test_warp_finds_the_cheapest_path():
    """Against every path of a small table."""
    rng = np.random.default_rng(1)
    for n, m in [(1, 1), (1, 5), (4, 1), (4, 6), (5, 3)]:
        cost = rng.normal(size=(n, m))

        def cheapest(i, j, cost=cost):
            before = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
            before = [cheapest(*cell) for cell in before if min(cell) >= 0]
            return cost[i, j] + (min(before) if before else 0.0)

        rows, columns = warp(cost)
        steps = set(zip(np.diff(rows).tolist(), np.diff(columns).tolist(), strict=True))
        assert steps <= {(1, 1), (1, 0), (0, 1)} and (rows[0], columns[0], rows[-1], columns[-1]) == (
            0,
            0,
            n - 1,
            m - 1,
        )
        assert cost[rows, columns].sum() == pytest.approx(cheapest(n - 1, m - 1))


def test_median_filter():
    x = np.random.default_rng(2).normal(size=(2, 20))
    filtered = median_filter(x, 7)
    assert filtered.shape == x.shape
    assert filtered[1, 10] == np.median(x[1, 7:14]) and filtered[0, 0] == np.median(np.r_[x[0, 1:4], x[0, :4]])


def test_tokens_are_where_the_attention_is():
    """Token i looks at rows 10 i to 10 i + 10, through two heads, with noise."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 8, 80)) * 0.3
    for token in range(8):
        logits[:, token, 10 * token : 10 * token + 10] += 4
    weights = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    times = token_times(weights.astype(np.float32), 2, 5)
    assert times.tolist() == [0, 30, 40, 50, 60]  # the first begins with the sound


def test_words_are_tokens_up_to_the_next_space(tokens):
    text = said(" Hé, you two.")
    words = split_words(tokens, text, "en")
    assert [word for word, _ in words] == [" Hé", ",", " you", " two", "."]
    assert sum((ids for _, ids in words), []) == text
    assert [word for word, _ in split_words(tokens, said("日本"), "ja")] == ["日", "本"]


class Evenly:
    """Each token looks at five rows of its own."""

    def truncate(self, sequence, length):
        pass

    def alignment(self, sequence, tokens, heads):
        return np.repeat(np.eye(len(tokens), dtype=np.float32), 5, axis=1)[None] + 0.01


def test_translations_have_the_words_of_english(tokens):
    """Of a sound in a language without spaces, too."""
    model, text = replace(tokens, languages={"ja": DE}), said(" two books")
    spoken = {
        task: spoken_words(Evenly(), 0, model, [(0, 0)], "ja", task, text, [0.5] * len(text), 200)[0]
        for task in ("transcribe", "translate")
    }
    assert [one.word.word for one in spoken["translate"]] == [" two", " books"]
    assert [one.word.word for one in spoken["transcribe"]][:3] == [" t", "w", "o"]


def test_punctuation_joins_its_word():
    words = [Spoken(Word(text, i, i + 1, 0.5), (i,)) for i, text in enumerate([' "', "no", ",", " he", ".", '"'])]
    merged = merge_punctuation(words)
    assert [one.word.word for one in merged] == [' "no,', ' he."']
    assert [(one.word.start, one.word.end) for one in merged] == [(1, 2), (3, 4)]
    assert [one.tokens for one in merged] == [(0, 1, 2), (3, 4, 5)]
