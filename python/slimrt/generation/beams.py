"""Beam search for a text: after a prompt (decoder-only models) or from a source (encoder-decoders)."""

from __future__ import annotations

import time
from dataclasses import replace

from slimrt.generation.generate import Run
from slimrt.generation.search import Append, Engine, Hypothesis, Task, beam_search
from slimrt.generation.sequences import Sequences
from slimrt.results import Generation, Timings
from slimrt.runtime.kinds import places


def beam_places(run: Run) -> int:
    """How many of the engine's sequences search_beams uses for this run. Errors as places()."""
    n_prompt, limit = len(run.prompt), _limit(run)
    return places(run.runtime, run.options.num_beams, n_prompt + max(limit - 1, 0), shared=n_prompt)


class SearchedRun(Run):
    """One text that a beam search finds: all of it is there at once, at the end."""

    _found: Generation | None = None

    @property
    def needs(self) -> int:
        """As many sequences as there are beams. Errors as beam_places."""
        return beam_places(self)

    def task(self) -> Task[Generation]:
        best = (yield from search_beams(Sequences(self.runtime), self, self._called))[0]
        self._found, self.finish_reason = best, best.finish_reason
        self.tokens, self._text = list(best.tokens), [best.text]
        return best

    def result(self) -> Generation:
        return self._found or super().result()


def _limit(run: Run) -> int:
    """The most tokens to generate: max_tokens, but at most what the context holds (the last token needs no row)."""
    room = run.runtime.n_ctx - len(run.prompt) + 1
    return room if run.options.max_tokens < 0 else min(run.options.max_tokens, room)


def search_beams(engine: Engine, run: Run, called: float) -> Task[list[Generation]]:
    """Beam search for the text of a run, with its options; at most num_beams texts, best first.

    Args:
        called: time.perf_counter() when the user called, for the time to first token.
    """
    options, prompt, limit = run.options, list(run.prompt), _limit(run)

    def report(n_tokens: int) -> None:
        if options.on_progress is not None:
            options.on_progress("decode", n_tokens, options.max_tokens)

    sequence = engine.new_sequence()
    try:
        yield from run.sources(sequence)
        row = (yield Append([(sequence, prompt)]))[0]
        ready = time.perf_counter()
        found = [Hypothesis((), (), False)]
        if limit > 0:
            found = yield from beam_search(
                engine, sequence, row, run.adjust, run.ends, limit, num_beams=options.num_beams,
                length_penalty=options.length_penalty, early_stopping=options.early_stopping, given=run.n_given,
                on_step=report, bans=run.bans,
            )  # fmt: skip
    finally:
        engine.free_sequence(sequence)
    reason = "length" if limit == options.max_tokens else "context"
    reasons = [run.reason_of_end(len(one.tokens)) if one.ended else reason for one in found]
    return [_result(run, *one, ready, called) for one in zip(found, reasons, strict=True)]


def _result(run: Run, found: Hypothesis, reason: str, ready: float, called: float) -> Generation:
    blank, n_tokens = run.result(), len(found.tokens)
    first, now = ready - called, time.perf_counter()
    return replace(
        blank,
        text=run.text_of(found.tokens),
        tokens=found.tokens,
        finish_reason=reason,
        truncated=reason == "context",
        usage=replace(blank.usage, completion_tokens=n_tokens),
        timings=Timings(first, blank.usage.prompt_tokens / first, max(n_tokens - 1, 0) / (now - ready)),
        cache=replace(blank.cache, bytes=run.runtime.cache_bytes(len(run.prompt) + n_tokens)),
    )
