# SPDX-License-Identifier: Apache-2.0
"""A model that drafts for itself from few rows of a long text: the same tokens as without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slimrt
from conftest import GOLDEN
from slimrt.errors import UnsupportedError
from slimrt.generation import guesser
from slimrt.generation.loop import loop_of
from slimrt.generation.options import Options
from slimrt.generation.pace import Recent
from slimrt.generation.thin_forks import ThinForks

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = Path(__file__).parents[1] / "models"
TALE, NEOX, CHAT = MODELS / "tale-llama.gguf", MODELS / "tale-neox.gguf", MODELS / "tale-chat.gguf"
STORY = (MODELS / "heldout.txt").read_text()
SIZES = {"n_ctx": 640, "n_seqs": 3, "cache_type": "f32"}
LEAST = 4 * 3 * 32  # tokens of a text that has guesses


cost = guesser.Guesser.cost


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    """Whatever this machine's steps take."""
    monkeypatch.setattr(guesser.Guesser, "cost", lambda self, n, n_texts, pace: 1.0)


def drafting(path: Path = TALE, **options) -> slimrt.Model:
    """Forks of three blocks, of texts that these models can hold."""
    model = slimrt.Model(path, draft_model="self", **SIZES | options)
    model._runtime.draft = ThinForks(model._runtime, newest=2)
    return model


@pytest.fixture(scope="module")
def plain():
    with slimrt.Model(TALE, **SIZES) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(plain) -> list[list[int]]:
    """Three long ones, and how they begin."""
    ids = plain.tokenize(STORY)
    return [ids[:420], ids[500:950], ids[1000:1400]]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 9, "repeat_penalty": 1.3, "dry_multiplier": 0.5},
        {"temperature": 0.0, "lookup": True},
    ],
    ids=str,
)
def test_the_tokens_are_those_that_come_without(plain, prompts, options):
    """Of several texts, and of answers to one."""
    options |= {"max_tokens": 60, "ignore_eos": True}
    with drafting() as model:
        with model._runtime.use() as engine:
            free = engine.free_blocks()
        for given in (prompts, prompts[0]):
            more = {"n": 3} if given is not prompts else {}
            found = model.generate(given, **options | more)
            wanted = plain.generate(given, **options | more | {"lookup": False})
            assert [one.tokens for one in found] == [one.tokens for one in wanted]
            assert all(one.usage.drafted_tokens > 0 for one in found)
            assert sum(one.usage.accepted_tokens for one in found) > 0
        with model._runtime.use() as engine:
            assert engine.free_blocks() == free, "nothing of a thin fork stays"


@pytest.mark.parametrize(("path", "types"), [(TALE, "q8"), (TALE, "f16"), (NEOX, "f32")])
def test_rows_of_other_types_and_another_architecture(path, types):
    """Rows are rounded after their own step, so that tokens may differ where rows are not floats of 32 bits."""
    options = {"max_tokens": 50, "temperature": 0, "ignore_eos": True}
    with drafting(path, cache_type=types, n_ctx=512) as model, slimrt.Model(path, n_ctx=512, cache_type=types) as alone:
        ids = model.tokenize(STORY)[:400]
        found, wanted = model.generate(ids, **options), alone.generate(ids, **options)
    assert found.usage.accepted_tokens > 10 and (types != "f32" or found.tokens == wanted.tokens)


class Slow(Recent):
    def note(self, seconds: float) -> None:
        self.seconds = 1.0


def test_forks_that_read_too_much_are_tried_and_left(plain, prompts, monkeypatch):
    """As if a step of few rows took a second."""
    monkeypatch.setattr(guesser.Guesser, "cost", cost)
    options = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    with drafting() as model:
        model._runtime.draft.steps.default_factory = Slow
        found = model.generate(prompts[0], **options)
    assert 0 < found.usage.drafted_tokens <= 8 and found.tokens == plain.generate(prompts[0], **options).tokens


def test_a_text_that_is_not_long_has_no_guesses(plain, prompts):
    options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with drafting() as model:
        short = prompts[0][: LEAST - 50]
        found = model.generate(short, **options)
        assert found.tokens == plain.generate(short, **options).tokens and found.usage.drafted_tokens == 0
        longer = model.generate(prompts[0][: LEAST - 20], **options)
        assert longer.tokens == plain.generate(prompts[0][: LEAST - 20], **options).tokens
        assert 0 < longer.usage.drafted_tokens, "from where it is long enough on"
        assert [one.usage.drafted_tokens > 0 for one in model.generate([short, prompts[1]], **options)] == [False, True]


def test_texts_that_give_up_their_rows(plain, prompts):
    """The cache holds two of three; who has given his rows up has no guesses until they are there again."""
    options = Options(max_tokens=60, temperature=0.0, ignore_eos=True)
    with drafting(cache_tokens=1100) as model:
        loop = loop_of(model._runtime)
        runs = [model._run(prompt[:400], options, 0, None, 0.0) for prompt in prompts]
        tickets = [loop.submit(run.task(), meter=run.meter, eager=True) for run in runs]
        given_up = 0
        while not all(one.done for one in tickets):
            loop.step()
            if given_up < 2 and len(runs[1].tokens) > 10 * (given_up + 1) and loop._engine.gives_up(tickets[1].wants):
                loop.room.give_up(tickets[1])
                given_up += 1
    wanted = [plain.generate(one[:400], max_tokens=60, temperature=0, ignore_eos=True).tokens for one in prompts]
    assert [one.result().tokens for one in tickets] == wanted and given_up == 2
    assert all(one.result().usage.drafted_tokens for one in tickets)


def test_without_room_for_guesses_a_text_goes_on(plain, prompts):
    """Every block is held: a fork would need some of its own."""
    options = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with drafting(n_seqs=1, n_ctx=640, cache_tokens=640) as model:
        with model.session() as other:
            other.append([5] * 128, last_only=True)
            found = model.generate(prompts[2][:480], **options)
        assert found.tokens == plain.generate(prompts[2][:480], **options).tokens


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        (TALE, {"cache": "k"}, "cache mode kv in all layers"),
        (TALE, {"cache": "kivi", "cache_type": "auto"}, "kivi of tale-llama.gguf age"),
        (MODELS / "tale-t5.gguf", {}, "tale-t5.gguf is an encoder-decoder of texts"),
    ],
)
def test_what_cannot_draft_for_itself(path, options, words):
    for call in (slimrt.Model, slimrt.plan):
        with pytest.raises(UnsupportedError, match=words):
            call(path, draft_model="self", **{"n_ctx": 256} | options)


def test_rows_that_no_fork_leaves_out(convert, tmp_path):
    """Behind a window, however short the context; and keys without positions, which layers share. A plan says so."""
    shared = tmp_path / "shared.gguf"
    slimrt.convert(MODELS / "tale-neox.gguf", shared, kv_layers=2, progress=False)
    for path, words in (
        (convert(GOLDEN / "mistral_window"), "behind a window"),
        (shared, "cache mode kv in all layers"),
    ):
        for call in (slimrt.Model, slimrt.plan):
            with pytest.raises(UnsupportedError, match=f"cannot draft for itself.*{words}"):
                call(path, draft_model="self", n_ctx=8)


def test_what_it_takes_and_is_called():
    with slimrt.Model(TALE, draft_model="self", **SIZES) as model:
        assert model.info()["draft"] == {"name": "self", "n_ctx": 640, "bytes": 0}
        assert "1024 rows of texts of 4096 and more" in str(model._runtime.draft)
    alone, own = (slimrt.plan(TALE, draft_model=one, max_queue=2, **SIZES).asked for one in (None, "self"))
    assert own.draft == 0 and own.total - alone.total == own.logits - alone.logits > 0
    for sizes in ({"n_seqs": 64}, {"n_seqs": 4, "cache_tokens": 512}):  # of which there is no context without end
        assert slimrt.plan(TALE, draft_model="self", n_ctx=256, **sizes).asked.draft == 0


def test_the_flag(run):
    options = [CHAT, "-p", "hello", "-n", "10", "--temp", "0", "--json", "-q", "-c", "512"]
    code, out, _ = run("generate", *options, "--draft-model", "self")
    assert code == 0 and json.loads(out)["tokens"] == json.loads(run("generate", *options)[1])["tokens"]
    assert run("plan", CHAT, "-md", "self")[0] == 0
