"""Responses in OpenAI's format, as plain dictionaries: pure functions of what was generated."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.results import Generation, TokenLogprob

Json = dict[str, Any]
BytesOf = Callable[[int], bytes]
"""The bytes of a token, by its id."""

_REASONS = {"stop": "stop", "length": "length", "context": "length", "unfinished": None}


@dataclass(frozen=True)
class Head:
    """The fields shared by a response and all its chunks."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Head:
        """With a new id, and the current time."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def response(self, kind: str, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """A whole response, or a chunk of one."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": list(choices)}
        return head if usage is None else head | {"usage": usage}


def usage(prompts: Sequence[Generation], answers: Sequence[Generation]) -> Json:
    """Counts of tokens. prompts: one result for each prompt, so that each prompt counts once; answers: all results."""
    prompt = sum(one.usage.prompt_tokens for one in prompts)
    completion = sum(one.usage.completion_tokens for one in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def finish_reason(result: Generation) -> str | None:
    """OpenAI's finish_reason; None for an unfinished text."""
    return _REASONS[result.finish_reason]


def completion_choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    """A choice of a text_completion or of a chunk of one."""
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def chat_reason(result: Generation, has_called: bool) -> str | None:
    """OpenAI's finish_reason of a message. has_called: it has tool calls, and none is cut off, as by a stop string."""
    return "tool_calls" if has_called and result.finish_reason == "stop" else finish_reason(result)


def chat_choice(index: int, message: Json, reason: str | None, logprobs: Json | None) -> Json:
    """A choice of a chat.completion."""
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def chat_piece(index: int, delta: Mapping[str, Any], logprobs: Json | None, reason: str | None) -> Json:
    """A choice of a chat.completion.chunk."""
    return {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": reason}


def completion_logprobs(
    tokens: Sequence[TokenLogprob], count: int, bytes_of: BytesOf, *,
    offset: int = 0, first: str | None = None, prompt: Sequence[TokenLogprob] = (),
) -> Json:  # fmt: skip
    """The logprobs of a text_completion: lists with one entry for each token.

    Args:
        count: most likely tokens shown at each position, besides the chosen one.
        offset: characters before the text of these tokens.
        first, prompt: an echoed prompt: the text of its first token, which has no probability, and its other tokens.
    """
    texts = [] if first is None else [first]
    values: list[float | None] = [None] * len(texts)
    tops: list[dict[str, float] | None] = [None] * len(texts)
    offsets = [0] * len(texts) + [one.offset for one in prompt] + [offset + one.offset for one in tokens]
    for one in (*prompt, *tokens):
        texts.append(one.text)
        values.append(one.logprob)
        likeliest = reversed(one.top[:count])  # of tokens with the same text the most likely is written last, and stays
        tops.append({text_of(top.token, bytes_of): top.logprob for top in likeliest} | {one.text: one.logprob})
    return {"tokens": texts, "text_offset": offsets, "token_logprobs": values, "top_logprobs": tops}


def chat_logprobs(tokens: Sequence[TokenLogprob], count: int, bytes_of: BytesOf) -> Json:
    """The logprobs of a chat.completion: one entry for each token, with the `count` most likely ones."""
    entries = [
        _entry(one.token, one.logprob, bytes_of)
        | {"top_logprobs": [_entry(top.token, top.logprob, bytes_of) for top in one.top[:count]]}
        for one in tokens
    ]
    return {"content": entries, "refusal": None}


def _entry(id: int, logprob: float, bytes_of: BytesOf) -> Json:
    return {"token": text_of(id, bytes_of), "bytes": list(bytes_of(id)), "logprob": logprob}


def text_of(id: int, bytes_of: BytesOf) -> str:
    return bytes_of(id).decode("utf-8", "replace")


def embeddings(vectors: NDArray[np.float32], n_tokens: int, model: str, encoding_format: str) -> Json:
    """OpenAI's list of embeddings. vectors: float32 (n, d). encoding_format: "float", or "base64" (float32 LE)."""

    def written(vector: NDArray[np.float32]) -> Any:
        return (
            base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if encoding_format == "base64"
            else vector.tolist()
        )

    data = [{"object": "embedding", "embedding": written(one), "index": index} for index, one in enumerate(vectors)]
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }
