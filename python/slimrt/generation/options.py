"""How a text is generated: the keywords of generate, stream and chat, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.plumbing.arguments import check_function, check_seed, real, whole

REPEAT_LAST_N = 64  # tokens that repeat_penalty looks back on

LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
OnProgress = Callable[[str, int, int], object]


class GenerateOptions(TypedDict, total=False):
    """The keywords of generate, stream, chat and their async twins. See Model.generate."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
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
    repeat_penalty: float = 1.0
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
        for name in ("max_tokens", "top_k", "logprobs", "num_beams"):
            whole(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", "repeat_penalty"):
            real(name, getattr(self, name))
        check_seed(self.seed)
        if not isinstance(self.stop, Sequence) or not all(isinstance(stop, str) for stop in self.stops):
            raise TypeError(f"stop must be text, or a sequence of texts, got {self.stop!r}")
        for name in ("logits_processor", "on_progress"):
            check_function(name, getattr(self, name))

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampler(self, seed: int) -> core.Sampler:
        return core.Sampler(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=REPEAT_LAST_N,
            seed=seed,
        )
