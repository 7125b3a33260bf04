"""How a text is generated: the keywords of generate, stream and chat, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.plumbing.arguments import check_function, check_seed, real, whole

PENALTIES = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Names, and the values that change nothing."""

LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
OnProgress = Callable[[str, int, int], object]


class GenerateOptions(TypedDict, total=False):
    """The keywords of generate, stream, chat and their async twins. See Model.generate."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str]
    ignore_eos: bool
    seed: int | None
    logprobs: int
    num_beams: int
    logits_processor: LogitsProcessor | None
    on_progress: OnProgress | None


@dataclass(frozen=True)
class Options:
    """The same with their defaults, checked.

    Raises:
        UnsupportedError: num_beams > 1.
        ValueError, TypeError: an option out of its range (the sampler's own are checked in sampler()), or of a wrong
            kind.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int = 0
    num_beams: int = 1
    logits_processor: LogitsProcessor | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_beams()
        if self.max_tokens < -1:
            raise ValueError(f"max_tokens (-n) must be -1 (no limit but the context) or more, got {self.max_tokens}")
        if self.logprobs < 0:
            raise ValueError(f"logprobs must not be negative, got {self.logprobs}")
        if "" in self.stops:
            raise ValueError("a stop string must not be empty")

    def _check_beams(self) -> None:
        if self.num_beams != 1:
            raise UnsupportedError(
                f"num_beams={self.num_beams}: beam search is not supported; what is: num_beams=1 with temperature=0 "
                "(greedy), or sampling with temperature, top_k, top_p and min_p"
            )

    def _check_kinds(self) -> None:
        for name in ("max_tokens", "top_k", "repeat_last_n", "logprobs", "num_beams"):
            whole(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", "typical_p", *PENALTIES):
            real(name, getattr(self, name))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            real(f"logit_bias of token {whole('a token id in logit_bias', token)}", bias)
        check_seed(self.seed)
        if not isinstance(self.stop, Sequence) or not all(isinstance(stop, str) for stop in self.stops):
            raise TypeError(f"stop must be text, or a sequence of texts, got {self.stop!r}")
        for name in ("logits_processor", "on_progress"):
            check_function(name, getattr(self, name))

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def biases(self, ends: Iterable[int]) -> dict[int, float]:
        """What is added to logits: logit_bias, and -infinity for the ends of the text with ignore_eos."""
        return dict(self.logit_bias or {}) | (dict.fromkeys(ends, -math.inf) if self.ignore_eos else {})

    def sampler(self, seed: int, ends: Iterable[int] = ()) -> core.Sampler:
        """ends: of the text, for ignore_eos."""
        return core.Sampler(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repeat_last_n=self.repeat_last_n,
            seed=seed,
            logit_bias=list(self.biases(ends).items()),
        )
