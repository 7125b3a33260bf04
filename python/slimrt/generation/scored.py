"""Log probabilities of a prompt's tokens, computed in pieces, since the logits of all tokens are large."""

from __future__ import annotations

import functools
import itertools

from slimrt import core
from slimrt.generation.loop import loop_of
from slimrt.generation.search import Read, Task
from slimrt.results import TokenLogprob, TopLogprob
from slimrt.runtime.kinds import require
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session, check_length


def prompt_logprobs(runtime: Runtime, ids: list[int], n: int) -> tuple[str, list[TokenLogprob]]:
    """The text of the first token, and a TokenLogprob of each further one, with the n most likely tokens in its place.

    The texts concatenated are the text of the ids, without control tokens.
    """
    return loop_of(runtime).run([(1, scored(runtime, ids, n))])[0]


def scored(runtime: Runtime, ids: list[int], n: int) -> Task[tuple[str, list[TokenLogprob]]]:
    """The same as a task.

    Raised at once: ContextOverflowError: the text does not fit. ValueError: it has no tokens. UnsupportedError: the
    model has an encoder.
    """
    require(runtime, "text", to="score a prompt")
    if not ids:
        raise ValueError("the prompt has no tokens: give some text")
    check_length(len(ids), runtime, "the text")
    return _scored(runtime, ids, n)


def _scored(runtime: Runtime, ids: list[int], n: int) -> Task[tuple[str, list[TokenLogprob]]]:
    tokenizer, found = runtime.source.tokenizer, list[TokenLogprob]()
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    texts = [detokenizer.feed(id) for id in ids]
    offsets = [0, *itertools.accumulate(map(len, texts))]

    @functools.cache
    def text_of(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    with Session.new(runtime) as session:
        session.replaceable = True
        while left := ids[len(found) : -1]:
            for row in (yield Read(session, left)):
                at = len(found) + 1
                logprob, top = core.token_logprobs(row, ids[at], n)
                shown = tuple(TopLogprob(id, text_of(id), value) for id, value in top)
                found.append(TokenLogprob(ids[at], texts[at], logprob, shown, offsets[at]))
    return texts[0], found
