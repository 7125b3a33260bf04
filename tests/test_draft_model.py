# SPDX-License-Identifier: Apache-2.0
"""Guesses of a smaller model: the same tokens as without, in fewer steps where they are right, and none where not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

import slimrt
from slimrt.errors import CacheUnsupportedError, UnsupportedError, WontFitError
from slimrt.generation import draft_model
from slimrt.generation.loop import loop_of
from slimrt.generation.odds import Odds
from slimrt.generation.pace import Pace, Recent
from slimrt.runtime.drafting import check_draft
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parents[1] / "models"
TALE, OTHER, FOREIGN = MODELS / "tale-llama.gguf", MODELS / "tale-gqa.gguf", MODELS / "tale-chat.gguf"
STORY = "Anna was a baker in a green valley. She worked in the bakery with her friend Fred. One day"
SIZES = {"n_ctx": 512, "n_seqs": 3, "cache_type": "f32"}


@pytest.fixture
def always_pays(monkeypatch):
    """Whatever this machine's steps take."""
    monkeypatch.setattr(draft_model.DraftModel, "cost", lambda self, n, n_texts, pace: 1.0)


@pytest.fixture(scope="module")
def plain():
    with slimrt.Model(TALE, **SIZES) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def poor(tmp_path_factory) -> Path:
    """A model of the same vocabulary that takes each token for another one."""
    path = tmp_path_factory.mktemp("poor") / "poor.gguf"
    shutil.copyfile(OTHER, path)
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in ("token_embd.weight", "output.weight"):
            tensor.data[:] = np.random.default_rng(1).permutation(tensor.data, axis=0)
    reader.data.flush()
    return path


class Unnoted(Recent):
    """As if guessing cost nothing."""

    def note(self, seconds: float) -> None:
        pass


class Slow(Recent):
    def note(self, seconds: float) -> None:
        self.seconds = 1.0


def drafting(draft: Path, **options) -> slimrt.Model:
    return slimrt.Model(TALE, draft_model=draft, **(SIZES | options))


@pytest.mark.usefixtures("always_pays")
class TestSameTokens:
    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.0},
            {"temperature": 0.8, "seed": 5},
            {"temperature": 1.0, "seed": 9, "repeat_penalty": 1.3, "dry_multiplier": 0.5},
            {"temperature": 0.0, "stop": "the"},
            {"temperature": 0.0, "lookup": True},
            {"temperature": 0.9, "seed": 4, "regex": "([a-d]{3}, )*end"},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("draft", [TALE, OTHER], ids=["itself", "another"])
    def test_with_any_options(self, plain, draft, options):
        if "regex" in options:
            pytest.importorskip("llguidance")
        wanted = plain.generate(STORY, max_tokens=100, **options | {"lookup": False})
        with drafting(draft) as model:
            got = model.generate(STORY, max_tokens=100, **options)
            assert (got.tokens, got.text, got.finish_reason) == (wanted.tokens, wanted.text, wanted.finish_reason)
            assert got.usage.drafted_tokens > 0 == wanted.usage.drafted_tokens

    def test_a_copy_is_nearly_always_right_and_saves_steps(self, plain, monkeypatch):
        options, steps = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}, []
        with drafting(TALE) as model:
            engine = loop_of(model._runtime)._engine
            append = engine.append
            monkeypatch.setattr(engine, "append", lambda *a: steps.append(1) or append(*a))
            got = model.generate(STORY, **options)
        assert got.tokens == plain.generate(STORY, **options).tokens
        assert got.usage.accepted_tokens >= 0.95 * got.usage.drafted_tokens and len(steps) < 40

    def test_texts_of_a_list_and_answers(self, plain):
        prompts, options = [STORY, "One two three", "The sailor"], {"max_tokens": 50, "temperature": 0.7, "seed": 3}
        with drafting(OTHER) as model:
            together, apart = model.generate(prompts, **options), plain.generate(prompts, **options)
            assert [one.tokens for one in together] == [one.tokens for one in apart]
            assert all(one.usage.drafted_tokens for one in together)
            answers, wanted = model.generate(STORY, n=3, **options), plain.generate(STORY, n=3, **options)
            assert [one.tokens for one in answers] == [one.tokens for one in wanted]
            assert all(one.usage.drafted_tokens for one in answers)

    def test_a_session_holds_the_text_and_no_guesses(self, plain):
        options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with drafting(OTHER) as model, model.session() as session, plain.session() as other:
            model.generate(STORY, session=session, **options)
            plain.generate(STORY, session=other, **options)
            assert session.tokens == other.tokens

    def test_up_to_the_end_of_the_context_and_beyond(self):
        options = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "on_overflow": "shift"}
        with drafting(OTHER, n_ctx=128) as model, slimrt.Model(TALE, n_ctx=128, cache_type="f32") as alone:
            got, wanted = model.generate(STORY, **options), alone.generate(STORY, **options)
            assert got.tokens == wanted.tokens and got.shifted == wanted.shifted > 0 and got.usage.drafted_tokens

    def test_a_prompt_longer_than_a_batch_is_caught_up_with_in_pieces(self, plain):
        options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with drafting(TALE, n_batch=16) as model:
            got = model.generate(STORY * 4, **options)
        assert got.tokens == plain.generate(STORY * 4, **options).tokens
        assert got.usage.accepted_tokens > 0

    def test_a_draft_that_has_no_room_proposes_nothing(self, plain):
        options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with drafting(TALE) as model:
            held = model._runtime.draft.runtime
            with Session.new(held) as one, Session.new(held) as two:
                for session in (one, two):
                    session.append([5] * 512, last_only=True)
                with Session.new(held) as three:
                    three.append([5] * 512, last_only=True)
                    got = model.generate(STORY, **options)
                later = model.generate(STORY, **options)
        assert got.tokens == plain.generate(STORY, **options).tokens and got.usage.drafted_tokens == 0
        assert later.tokens == got.tokens and later.usage.drafted_tokens > 0


def test_a_poor_drafter_is_soon_turned_off(plain, poor, monkeypatch):
    monkeypatch.setattr(Pace, "cost", lambda self, more: 1 + 0.1 * more)
    options = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with drafting(poor) as model:
        model._runtime.draft.steps.default_factory = Unnoted
        got = model.generate(STORY, **options)
        again = model.generate(STORY, **options)
        assert got.tokens == again.tokens == plain.generate(STORY, **options).tokens
        assert got.usage.accepted_tokens < got.usage.drafted_tokens < 60
        assert 0 < again.usage.drafted_tokens < 20, "known from the last text, and tried again at times"


def test_a_slow_drafter_is_tried_and_left():
    """Right, but it takes longer than the steps that it saves."""
    with drafting(TALE) as model:
        model._runtime.draft.steps.default_factory = Slow
        got = model.generate(STORY, max_tokens=200, temperature=0, ignore_eos=True)
        assert 0 < got.usage.drafted_tokens <= 8


def test_how_many_pay():
    odds = Odds()
    for _ in range(100):
        odds.learn(True)
    assert odds.best(7, lambda n: 1 + 0.1 * n) == 7
    assert odds.best(7, lambda n: 1 + 0.1 * n if n < 4 else 9.0) == 3
    assert odds.best(7, lambda n: 1 + 1.1 * n) == 0
    assert odds.best(0, lambda n: 1.0) == 0
    for _ in range(100):
        odds.learn(False)
    assert odds.best(7, lambda n: 1 + 0.1 * n) == 0
    for _ in range(64):  # it is worked out anew after every eight
        odds.rest()
    assert odds.best(7, lambda n: 1 + 0.1 * n) == 1, "a trial, for at most 2 % of the time since"
    odds.guessed()
    assert odds.best(7, lambda n: 1 + 0.1 * n) == 0


def test_another_tokenizer_is_refused_in_words():
    with pytest.raises(UnsupportedError, match=r"tale-chat.*cannot draft for.*tale-llama.*900 tokens, not 1662"):
        drafting(FOREIGN)
    with pytest.raises(UnsupportedError, match="tale-t5.gguf is an encoder-decoder of texts"):
        drafting(MODELS / "tale-t5.gguf")
    with pytest.raises(FileNotFoundError):
        drafting(MODELS / "nowhere.gguf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.tokens.__setitem__(7, "other"), r"token 7 is 'other', not .+"),
        (lambda v: object.__setattr__(v, "control", v.control | {9}), r"control tokens: \[9\]"),
        (
            lambda v: object.__setattr__(v, "special_ids", {"bos": 1}),
            r"special tokens are \{'bos': 1\}, not \{'bos': 0",
        ),
    ],
)
def test_what_differs_is_said(change, words):
    from slimrt.modelfile.source import ModelSource

    mine, target = ModelSource.of(OTHER, None), ModelSource.of(TALE, None)
    check_draft(mine, target)
    change(mine.tokenizer.vocabulary)
    with pytest.raises(UnsupportedError, match=words):
        check_draft(mine, target)


def test_rows_that_age_are_refused():
    with pytest.raises(UnsupportedError, match="kivi of tale-llama.gguf age"):
        drafting(OTHER, cache="kivi", cache_type="auto")


def test_its_memory_counts_and_is_told(capfd):
    with drafting(OTHER, verbose=True) as model:
        memory, draft = model.memory(), model.info()["draft"]
        assert (
            draft["name"].startswith("tale-gqa") and draft["n_ctx"] == 512 and draft["bytes"] > OTHER.stat().st_size / 2
        )
    assert "drafts by tale-gqa" in capfd.readouterr().err
    both = memory["total"] + memory["mapped"] + draft["bytes"]
    with drafting(OTHER, memory_limit=both):
        pass
    with pytest.raises(
        WontFitError, match=r"drafts by tale-gqa.gguf .* \(weights .*, cache .*, buffers .*\)"
    ) as caught:
        drafting(OTHER, memory_limit=both - 1)
    assert (caught.value.needed, caught.value.available) == (both, both - 1)
    smaller = next(int(one.split()[1]) for one in caught.value.options if one.startswith("--ctx"))
    with drafting(OTHER, memory_limit=both - 1, n_ctx=smaller), slimrt.Model(TALE, memory_limit=both - 1, **SIZES):
        pass


@pytest.mark.parametrize("sizes", [{}, {"n_ctx": 256, "n_seqs": 2}, {"n_ctx": 96, "n_seqs": 5, "cache_tokens": 128}])
def test_the_plan_is_what_both_take(sizes):
    planned = slimrt.plan(TALE, draft_model=OTHER, **SIZES | sizes)
    alone, other = slimrt.plan(TALE, **SIZES | sizes), slimrt.plan(OTHER, **SIZES | sizes | {"cache_type": "auto"})
    with drafting(OTHER, **sizes) as model:
        memory, taken = model.memory(), model.info()["draft"]["bytes"]
        with model._runtime.draft.runtime.use() as engine:
            own = engine.memory()
    asked = planned.asked
    assert asked.total == memory["total"] + memory["mapped"] + taken == alone.asked.total + other.asked.total
    assert asked.draft == taken and asked.draft_cache == own["cache"] and asked.draft_scratch == own["scratch"]
    assert asked.draft_weights == own["mapped"] + own["weights"] + own["derived"]
    assert all(row.draft == taken for row in planned.rows) and alone.asked.draft == 0
    assert planned.draft_model == OTHER.name and f"drafts by {OTHER.name}: weights" in str(planned)
    assert "drafts by" not in str(alone)


def test_a_plan_says_what_cannot_draft():
    with pytest.raises(UnsupportedError, match="900 tokens, not 1662"):
        slimrt.plan(TALE, draft_model=FOREIGN)
    with pytest.raises(UnsupportedError, match="kivi of tale-llama.gguf age"):
        slimrt.plan(TALE, draft_model=OTHER, cache="kivi")


def test_a_context_that_nobody_asked_for_is_what_fits_with_it():
    limit = slimrt.plan(TALE, draft_model=OTHER, n_ctx=512).asked.total
    with (
        pytest.warns(UserWarning, match="the context is 512 tokens, the most that fits"),
        slimrt.Model(TALE, draft_model=OTHER, memory_limit=limit) as model,
    ):
        assert model.n_ctx == model.info()["draft"]["n_ctx"] == 512


def test_it_is_closed_with_the_model(monkeypatch):
    model = drafting(OTHER)
    draft = model._runtime.draft.runtime
    model.close()
    for runtime in (model._runtime, draft):
        with pytest.raises(ValueError, match="closed"), runtime.use():
            pass


def test_where_one_of_them_cannot_be_loaded_nothing_stays(monkeypatch):
    begun, closed, close = [], [], Runtime.close
    load = draft_model.load
    monkeypatch.setattr(Runtime, "close", lambda self: closed.append(self.source.name) or close(self))
    monkeypatch.setattr(draft_model, "load", lambda *given, **named: begun.append(1) or load(*given, **named))
    with pytest.raises(CacheUnsupportedError):
        drafting(OTHER, cache="latent")
    assert begun == closed == []
    monkeypatch.setattr(draft_model.DraftModel, "__init__", lambda self, runtime: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drafting(OTHER)
    assert begun == [1] and closed == [OTHER.name, TALE.name]


@pytest.mark.usefixtures("always_pays")
class TestFlag:
    def test_generate(self, run):
        options = [TALE, "-p", STORY, "-n", "40", "--temp", "0", "--json", "-q"]
        code, out, _ = run("generate", *options, "-c", "512", "--draft-model", TALE)
        plain = json.loads(run("generate", *options, "-c", "512")[1])
        got = json.loads(out)
        assert code == 0 and got["tokens"] == plain["tokens"]
        assert got["usage"]["accepted_tokens"] > 0 == plain["usage"]["drafted_tokens"]
        code, _, said = run("generate", *options, "-md", FOREIGN)
        assert code != 0 and "900 tokens, not 1662" in said

    def test_v_says_how_many_were_right(self, run):
        _, _, said = run("generate", TALE, "-p", STORY, "-n", "40", "--temp", "0", "-c", "512", "-v", "-md", TALE)
        assert "drafts by tale-llama" in said and "guesses right)" in said

    def test_plan_counts_it_and_generate_refuses_in_words(self, run):
        options = ["-c", "512", "--memory-limit", "1MiB", "-md", OTHER]
        code, out, _ = run("plan", TALE, *options)
        assert code == 1 and f"in each total, drafts by {OTHER.name}: weights" in out
        asked = json.loads(run("plan", TALE, *options, "--json")[1])["asked"]
        assert (
            asked["draft_weights"] > OTHER.stat().st_size / 2 and min(asked["draft_cache"], asked["draft_scratch"]) > 0
        )
        code, _, said = run("generate", TALE, "-p", STORY, *options)
        assert code == 1 and f"and drafts by {OTHER.name} " in said and ": 1.0 MiB available" in said

    def test_chat(self, run):
        options = ["chat", FOREIGN, "-p", "hello", "-n", "20", "--temp", "0", "-q"]
        assert run(*options, "--draft-model", FOREIGN) == run(*options)


def test_server_flag(tmp_path):
    pytest.importorskip("uvicorn")  # the extra `serve`
    from served import CHAT, served

    asked = {"prompt": "Anna has a red", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with served(tmp_path, "--parallel", "2", "--draft-model", str(CHAT)) as server:
        texts = set[str]()
        for _ in range(20):  # whether a guess pays is for the clock to say
            texts.add(json.loads(server.ask("/v1/completions", asked).body)["choices"][0]["text"])
            if right := server.metric('drafts_total{kind="accepted"}'):
                break
        assert 0 < right <= server.metric('drafts_total{kind="drafted"}')
    with slimrt.Model(CHAT) as model:
        assert texts == {model.generate("Anna has a red", max_tokens=40, temperature=0, ignore_eos=True).text}
