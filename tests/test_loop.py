# SPDX-License-Identifier: Apache-2.0
"""The loop that all callers of a model share: whatever comes, goes and gives up its rows, each text is its own."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import slimrt
from conftest import PROMPT
from slimrt.generation import queue
from slimrt.generation.answers import Answer, Root
from slimrt.generation.generate import Run
from slimrt.generation.loop import loop_of, prefixes_of
from slimrt.generation.options import Options
from slimrt.generation.pace import LEAST, Pace
from slimrt.generation.search import Append
from slimrt.generation.tickets import Call, Cancelled, Meter, Ticket

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

N_CTX, N_SEQS = 96, 4
PLAIN = {"n_ctx": N_CTX, "n_seqs": N_SEQS, "cache_type": "f32"}
MODELS = Path(__file__).parents[1] / "models"
GREEDY = {"temperature": 0.0}
STORY = "Anna was a baker in a green valley. She worked in the bakery with her friend Fred. One day"
PROMPTS = [STORY, STORY + " a sailor", STORY[:40], "The sailor went to the sea", "Fred was a farmer", STORY * 2]


def test_the_next_of_many_is_found_at_once(monkeypatch):
    """A forecast of 8000 series spent 26 s on choosing which begins next; oldest first, and owners in turn."""
    asked = []
    monkeypatch.setattr(queue, "attended", lambda one, only: asked.append(one) or one.awaited > 0)
    waiting, call, running = queue.Queue(), Call(), []
    for i in range(1000):
        one = Ticket(iter(()), 1, call if i < 900 else Call(), i, Meter())
        one.key, one.awaited = "b" if i >= 900 else "a", i != 901
        waiting.add(one)
    while len(running) < 4:
        running.append(waiting.next(running, None, 4))
        waiting.discard(running[-1])
    assert [one.order for one in running] == [0, 900, 902, 1] and waiting.next(running, None, 4) is None
    assert len(waiting) == len(list(waiting)) == 996 and len(asked) < 600


def load(**options) -> slimrt.Model:
    return slimrt.Model(MODELS / "tale-llama.gguf", **(PLAIN | options))


@pytest.fixture
def model():
    with load() as loaded:
        yield loaded


@cache
def alone(prompt: str, max_tokens: int, ignore_eos: bool) -> tuple[int, ...]:
    with load(n_seqs=1) as one:
        return one.generate(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, **GREEDY).tokens


class Anything(RuleBasedStateMachine):
    """Texts arrive, are cancelled, fork, and give up their rows, on a third of the cache that all could fill."""

    def __init__(self):
        super().__init__()
        self.model = load(cache_tokens=N_CTX * N_SEQS // 3)
        self.loop, self.tree = loop_of(self.model._runtime), prefixes_of(self.model._runtime)
        self.texts, self.session = [], None
        with self.model._runtime.use() as engine:
            self.n_blocks = engine.n_blocks()

    @rule(
        prompt=st.sampled_from(PROMPTS),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 60),
        ignore_eos=st.booleans(),
        reuse=st.booleans(),
        key=st.sampled_from("ab"),
    )
    def arrive(self, prompt, n, max_tokens, ignore_eos, reuse, key):
        runtime, ids = self.model._runtime, self.model.tokenize(prompt)
        options = Options(max_tokens=max_tokens, ignore_eos=ignore_eos, cache_prompt=reuse, **GREEDY)
        if n == 1:
            runs = [Run(runtime, ids, options, 0, None, 0.0)]
            runs[0].key = key
        else:
            root = Root(ids)
            runs = [Answer(runtime, root, i, options, 0, 0.0) for i in range(n)]
        for one in runs:
            ticket = self.loop.submit(one.task(), meter=one.meter, key=key, eager=True)
            self.texts.append((ticket, prompt, max_tokens, ignore_eos))

    @rule(times=st.integers(1, 12))
    def go_on(self, times):
        for _ in range(times):
            self.loop.step()

    @rule(choice=st.randoms(use_true_random=False))
    def cancel(self, choice):
        if self.texts:
            choice.choice(self.texts)[0].cancel()

    @rule(n=st.integers(1, 32))
    def hold_a_session(self, n):
        """A caller's own rows are his: nobody takes them. A block of four leaves room for one text of any length."""
        if self.session is not None:
            self.session.close()
        self.session = self.model.session()
        try:
            self.session.append(self.model.tokenize(STORY * 4)[:n])
        except slimrt.ContextOverflowError:
            self.session.close()
            self.session = None

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks):
        self.tree.evict(blocks)

    @invariant()
    def all_blocks_are_somewhere(self):
        with self.model._runtime.use() as engine:
            assert 0 <= engine.free_blocks() <= self.n_blocks

    def teardown(self):
        if self.session is not None:
            self.session.close()
        while self.loop.step():
            pass
        for ticket, prompt, max_tokens, ignore_eos in self.texts:
            assert ticket.done
            if not isinstance(ticket.error, Cancelled):
                assert ticket.result().tokens == alone(prompt, max_tokens, ignore_eos)
        self.texts.clear()
        with self.model._runtime.use() as engine:
            assert engine.free_blocks() + self.tree.held[0] == self.n_blocks
        self.tree.clear()
        with self.model._runtime.use() as engine:
            assert engine.free_blocks() == self.n_blocks
        self.model.close()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def count_items(monkeypatch, loop) -> list[int]:
    """Of each call of the engine, from here on, how many sequences it was for."""
    counts, append = [], loop._engine.append

    def counted(items, *arguments):
        counts.append(len(items))
        return append(items, *arguments)

    monkeypatch.setattr(loop._engine, "append", counted)
    return counts


def wait_for_each_other(monkeypatch, loop, n: int) -> None:
    """No thread computes before n of them wait for their texts, however the system schedules them."""
    wait, all_wait = loop.wait, threading.Barrier(n, timeout=60)

    def waits(tickets, until):
        first = [all_wait]

        def is_over() -> bool:  # first called when the loop knows that a thread waits for these tickets
            if first:
                first.pop().wait()
            return until()

        wait(tickets, is_over)

    monkeypatch.setattr(loop, "wait", waits)


def test_threads_share_steps(model, monkeypatch):
    counts, texts = count_items(monkeypatch, loop_of(model._runtime)), {}
    wait_for_each_other(monkeypatch, loop_of(model._runtime), 4)

    def work(i: int) -> None:
        texts[i] = model.generate(PROMPTS[i], max_tokens=60, ignore_eos=True, **GREEDY).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: alone(PROMPTS[i], 60, True) for i in range(4)}
    assert sum(counts) >= 4 * 60 and len(counts) < 3 * 60 and max(counts) == 4


def test_preempted_texts_come_back():
    """Two texts fill a cache of one context: the younger gives up its rows, and both end as they would alone."""
    with load(cache_tokens=N_CTX) as model:
        loop, options = loop_of(model._runtime), Options(max_tokens=60, ignore_eos=True, **GREEDY)
        runs = [Run(model._runtime, model.tokenize(STORY), options, 0, None, 0) for _ in range(2)]
        tickets = [loop.submit(one.task(), meter=one.meter) for one in runs]
        results = loop.results(tickets)
        assert [one.tokens for one in results] == [alone(STORY, 60, True)] * 2
        assert tickets[0].preemptions == 0 < tickets[1].preemptions


def test_short_prompts_that_find_no_room_wait():
    """They cost a step no more than texts do, and have no rows that could be given up."""
    with load(cache_tokens=N_CTX) as model, model.session() as session:
        session.append([1])
        loop, options, prompts = (
            loop_of(model._runtime),
            Options(max_tokens=20, **GREEDY),
            [STORY * 2, *["Fred was"] * 3],
        )
        runs = [Run(model._runtime, model.tokenize(one), options, 0, None, 0) for one in prompts]
        tickets = [loop.submit(runs[0].task(), eager=True)]
        loop.step()  # it has the two blocks that the session leaves
        tickets += [loop.submit(one.task(), eager=True) for one in runs[1:]]
        while loop.step():
            pass
        assert [one.result().tokens for one in tickets] == [alone(one, 20, False) for one in prompts]


def test_a_prompt_beside_the_texts_of_others_comes_in_pieces(monkeypatch):
    with load(n_ctx=1024, n_seqs=2) as model:
        loop, ids = loop_of(model._runtime), model.tokenize(STORY * 20)
        loop.pace.stall = 0.0  # as short as pieces get
        sizes, append = [], loop._engine.append

        def sized(items, *arguments):
            sizes.append([len(ids) for _, ids in items])
            return append(items, *arguments)

        monkeypatch.setattr(loop._engine, "append", sized)
        text = Run(
            model._runtime, model.tokenize(STORY), Options(max_tokens=200, ignore_eos=True, **GREEDY), 0, None, 0
        )
        first = loop.submit(text.task(), meter=text.meter, eager=True)
        for _ in range(3):
            loop.step()
        long = Run(model._runtime, ids, Options(max_tokens=5, **GREEDY), 0, None, 0)
        second = loop.submit(long.task(), meter=long.meter, eager=True)
        while not second.done:
            loop.step()
        beside = [max(step) for step in sizes[3:] if len(step) == 2 and max(step) > 1]
        assert len(beside) >= len(ids) // LEAST and max(beside) <= LEAST
        assert [1] in sizes[4:]  # the text goes on alone in between
        loop.end([first])
        with load(n_ctx=1024, n_seqs=1) as one:
            assert second.result().tokens == one.generate(ids, max_tokens=5, **GREEDY).tokens


def test_an_error_is_its_own_tasks_alone(model):
    def broken():
        yield Append([(model.session(), model.tokenize(STORY))])
        raise KeyError("mine")

    loop, other = loop_of(model._runtime), []
    thread = threading.Thread(
        target=lambda: other.append(model.generate(STORY, max_tokens=60, ignore_eos=True, **GREEDY))
    )
    thread.start()
    with pytest.raises(KeyError, match="mine"):
        loop.run([(1, broken())])
    thread.join()
    assert other[0].tokens == alone(STORY, 60, True)


def test_a_row_that_cannot_be_sampled_fails_its_own_text_alone(model):
    loop, ids, nothing = loop_of(model._runtime), model.tokenize(STORY), tuple(range(model.n_vocab))
    options = [Options(max_tokens=20, **GREEDY), Options(suppress_tokens=nothing, **GREEDY)]
    runs = [Run(model._runtime, ids, one, 1, None, 0.0) for one in options]
    tickets = [loop.submit(run.task()) for run in runs]
    loop.wait(tickets, lambda: False)
    assert tickets[0].result().tokens == alone(STORY, 20, False)
    with pytest.raises(ValueError, match="no token is left to choose"):
        tickets[1].result()


def test_a_callback_that_raises_ends_its_own_call_alone(model):
    seen, other = [], []

    def stop(stage, done, total):
        seen.append(stage)
        if stage == "decode" and done == 5:
            raise RuntimeError("enough")

    thread = threading.Thread(
        target=lambda: other.append(model.generate(STORY, max_tokens=60, ignore_eos=True, **GREEDY))
    )
    thread.start()
    with pytest.raises(RuntimeError, match="enough"):
        model.generate(PROMPTS[3], max_tokens=50, ignore_eos=True, on_progress=stop, **GREEDY)
    thread.join()
    assert "decode" in seen and other[0].tokens == alone(STORY, 60, True)


def test_a_callback_may_ask_for_a_text(model):
    """It is inside a step of the thread that others wait for."""
    inner = []

    def ask(stage, done, total):
        if stage == "decode" and not inner:
            inner.append(model.generate(PROMPTS[3], max_tokens=10, **GREEDY).tokens)

    outer = model.generate(STORY, max_tokens=20, on_progress=ask, **GREEDY).tokens
    assert outer == alone(STORY, 20, False) and inner == [alone(PROMPTS[3], 10, False)]


def test_a_stream_that_nobody_reads_holds_nobody_up():
    with load(n_seqs=1) as model, model.stream(STORY, max_tokens=30, **GREEDY) as stream:
        first = next(stream)
        assert model.generate(PROMPTS[3], max_tokens=30, **GREEDY).tokens == alone(PROMPTS[3], 30, False)
        assert first + "".join(stream) == model.generate(STORY, max_tokens=30, **GREEDY).text


def test_closing_waits_for_calls_of_other_threads():
    model, found, begun = load(), [], threading.Event()

    def work():
        told = {"on_progress": lambda *_: begun.set()}
        found.append(model.generate(STORY, max_tokens=60, ignore_eos=True, **told, **GREEDY))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    model.close()
    thread.join()
    assert len(found[0].tokens) == 60
    with pytest.raises(ValueError, match="closed"):
        model.generate(STORY)


def test_cancelling_frees_rows_at_the_next_step(model):
    loop, runtime = loop_of(model._runtime), model._runtime
    with runtime.use() as engine:
        free = engine.free_blocks()
    run = Run(runtime, model.tokenize(STORY), Options(max_tokens=60, **GREEDY), 0, None, 0)
    ticket = loop.submit(run.task(), eager=True)
    loop.step()
    ticket.cancel()
    assert not loop.step() and ticket.done
    with pytest.raises(Cancelled):
        ticket.result()
    with runtime.use() as engine:
        assert engine.free_blocks() == free


def test_whoever_has_least_comes_first(model):
    """Of three keys that wait, those with the fewest running; then whoever came first."""
    loop, order = loop_of(model._runtime), []

    def task(name):
        order.append(name)
        yield Append([(model.session(), model.tokenize("a"))])

    loop._width = 2
    tickets = [loop.submit(task(key), key=key, eager=True) for key in "aaab"]
    loop._admit(None)
    assert order == ["a", "b"]
    while not all(one.done for one in tickets):
        loop.step()
    assert order == ["a", "b", "a", "a"]


@pytest.mark.parametrize("n", [2, 3])
def test_answers_outlive_the_one_that_computes_the_prompt(model, n):
    loop, root = loop_of(model._runtime), Root(model.tokenize(STORY))
    options = Options(max_tokens=30, **GREEDY)
    runs = [Answer(model._runtime, root, i, options, 0, 0.0) for i in range(n)]
    tickets = [loop.submit(one.task(), meter=one.meter, eager=True) for one in runs]
    del runs  # as of whoever cancels and goes
    loop._admit(None)  # the first one has begun to compute it
    tickets[0].cancel()
    while loop.step():
        pass
    assert [one.result().tokens for one in tickets[1:]] == [alone(STORY, 30, False)] * (n - 1)


class Piece:
    def __init__(self, length: int, before: int = 0):
        self.length, self.before = length, before

    def __len__(self) -> int:
        return self.length

    def cut(self, n: int) -> None:
        self.length = min(self.length, n)


def sizes(pace: Pace, lengths: list[int], texts: bool = True, before: int = 0) -> list[int]:
    return [len(one) for one in pace.pieces([Piece(length, before) for length in lengths], texts)]


def test_pieces_take_no_longer_than_texts_may_wait():
    pace = Pace(stall=0.4)
    assert sizes(pace, [1000]) == [LEAST]  # nothing is known yet
    pace.note(0.1, 0, 4, 4)
    pace.note(0.1 + 0.064, 64, 4, 4)  # 1 ms a token
    assert sizes(pace, [1000]) == []  # texts go on alone for as long as the piece took
    pace.note(0.1, 0, 4, 4)
    assert sizes(pace, [1000]) == [288]  # 0.4 s less a step of the texts, in whole units
    assert sizes(pace, [1000, 500, 80]) == [144, 80, 64]  # half to the oldest, then to who has the least left
    assert sizes(pace, [1000, 2000], texts=False) == [512]  # nobody waits: a whole batch, the oldest first
    assert pace.tokens_per_second == pytest.approx(1000)


def test_pieces_halve_where_texts_would_wait_too_long_for_them():
    pace = Pace(stall=0.4, share=1.0)
    pace.note(0.08, 0, 4, 4)
    for _ in range(20):  # far into a long prompt: 12 ms a token
        pace.note(0.08 + 0.012 * 64, 64, 4, 4)
    assert sizes(pace, [1000]) == [LEAST // 2] and sizes(pace, [1000, 900]) == [LEAST // 2]
    for _ in range(20):  # another's beginning: 6.5 ms a token in such pieces
        pace.note(0.08 + 0.0065 * 32, 32, 4, 4)
    assert sizes(pace, [1000]) == [LEAST]


@pytest.mark.parametrize("n_prompts, n_texts, steps", [(1, 2, 7), (2, 2, 7), (6, 2, 3), (14, 2, 1)])
def test_prompts_get_more_time_where_they_are_more_than_the_texts(n_prompts, n_texts, steps):
    pace, prompts = Pace(stall=0.4, share=0.5), [1000] * n_prompts
    pace.note(0.01, 0, n_texts, n_texts)
    assert sizes(pace, prompts)
    pace.note(0.01 + 0.064, 64, n_texts, n_texts)  # half of the time is theirs: the texts have 64 ms to go on alone
    alone = 0
    while not sizes(pace, prompts):
        pace.note(0.01, 0, n_texts, n_texts)
        alone += 1
    assert alone == steps


def test_a_step_that_was_not_measured_takes_what_lies_between_others():
    pace = Pace()
    assert pace.cost(3) == pytest.approx(1.3)  # as assumed
    pace.note(0.1, 0, 2, 2)
    assert pace.cost(4) == pytest.approx(1.2)
    for n_tokens, seconds in ((10, 0.2), (6, 0.16), (3, 1.0)):
        pace.note(seconds, 0, 2, n_tokens)
    assert [pace.cost(more) for more in (4, 6, 8, 12)] == pytest.approx([1.6, 1.8, 2.0, 2.2])
    assert pace.cost(1) == 1.5, "something else was in the way: a token alone takes no longer"


def test_pieces_grow_where_each_computes_what_is_stored_again():
    pace = Pace(recomputes=True)
    assert sizes(pace, [1000], before=3000) == [500] and sizes(Pace(), [1000], before=3000) == [LEAST]


@pytest.mark.parametrize("prompt", [PROMPT, STORY])
def test_rows_are_left_for_who_begins_alike(model, prompt):
    first = model.generate(prompt, max_tokens=20, cache_prompt=True, **GREEDY)
    longer = prompt + first.text + " and then"
    again = model.generate(longer, max_tokens=20, cache_prompt=True, **GREEDY)
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= len(model.tokenize(prompt)) if len(model.tokenize(prompt)) >= 32 else True
    assert again.tokens == model.generate(longer, max_tokens=20, **GREEDY).tokens


def test_a_session_finds_room_where_left_rows_are():
    with load(n_seqs=1) as model:
        model.generate(STORY * 2, max_tokens=20, cache_prompt=True, **GREEDY)
        with model.session() as session:
            assert session.append(model.tokenize(STORY) * 3).shape[0] > 64


@pytest.mark.parametrize("lengths", [((74, 1), (92, 7), (96, 3), (89, 1)), ((56, 6), (95, 4), (50, 7), (84, 6))])
def test_a_session_finds_room_where_left_rows_have_aged(lengths):
    """Of several kinds of blocks those that are scarcest may not be the ones that what is left last can free."""
    with load(n_seqs=1, n_ctx=128, n_batch=8, cache="lowrank", cache_type="auto", allow_lossy=True) as model:
        ids = (model.tokenize(STORY) * 6)[:126]
        for own, (begin, more) in enumerate(lengths):
            model.generate(ids[:begin] + [5 + own] * more, max_tokens=2, cache_prompt=True, ignore_eos=True, **GREEDY)
        assert len(model.score(ids).logprobs) == 125


@pytest.mark.parametrize("more", [0, 5, 20])  # as texts' tokens come, and as prompts do
def test_a_full_cache_needs_no_copy_of_what_was_left(more):
    """Rows that were left fill it to the last block, where the text goes on that begins as they do."""
    with load(n_seqs=1, n_ctx=64) as model:
        ids = (model.tokenize(STORY) * 4)[:60]
        model.generate(ids[:40], max_tokens=2, cache_prompt=True, **GREEDY)
        again = model.generate(ids[: 40 + more], max_tokens=2, cache_prompt=True, **GREEDY)
        assert again.usage.cached_tokens >= 39
        assert again.tokens == model.generate(ids[: 40 + more], max_tokens=2, **GREEDY).tokens


def test_several_answers_take_what_was_left(model):
    first = model.generate(STORY * 2, max_tokens=20, cache_prompt=True, **GREEDY)
    several = model.generate(STORY * 2 + first.text, n=3, max_tokens=10, cache_prompt=True, **GREEDY)
    assert min(one.usage.cached_tokens for one in several) >= len(model.tokenize(STORY * 2))
    assert {one.tokens for one in several} == {model.generate(STORY * 2 + first.text, max_tokens=10, **GREEDY).tokens}


def test_closing_waits_for_a_stream_that_is_read():
    model = load()
    stream, closed = model.stream(STORY, max_tokens=60, **GREEDY), threading.Event()
    next(stream)
    thread = threading.Thread(target=lambda: (model.close(), closed.set()))
    thread.start()
    assert closed.wait(20)  # nobody is waiting for it at this moment
    thread.join()
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_a_stream_that_nobody_holds_any_more_gives_its_rows_back():
    with load(n_seqs=1) as model:
        stream = model.stream(STORY * 2, max_tokens=20, **GREEDY)
        next(stream)
        del stream
        with model.session() as session:
            assert session.append(model.tokenize(STORY) * 3).shape[0] > 64


def test_a_callback_does_not_close_its_model(model):
    def close(stage, done, total):
        if stage == "decode":
            model.close()

    with pytest.raises(RuntimeError, match="must not close"):
        model.generate(STORY, max_tokens=5, on_progress=close, **GREEDY)
    assert model.generate(STORY, max_tokens=20, **GREEDY).tokens == alone(STORY, 20, False)
