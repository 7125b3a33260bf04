"""How a text is generated: the keywords of generate, stream and chat, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.generation.grammar import CONSTRAINTS, Grammar, source_of
from slimrt.plumbing.arguments import (
    check_function,
    check_seed,
    check_switch,
    count,
    exponent,
    positive,
    real,
    unknown,
    whole,
)  # fmt: skip

PENALTIES = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "dry_multiplier": 0.0}
FILTERS = {"top_n_sigma": 0.0, "top_k": 0, "typical_p": 1.0, "top_p": 1.0, "min_p": 0.0, "xtc_probability": 0.0}
"""Options, with the values that switch them off."""
BANS = ("min_tokens", "no_repeat_ngram_size", "suppress_tokens")
"""Options that say what may not come; None: what the model's file says."""
NOT_WITH_BEAMS: Mapping[str, object] = {
    "lookup": False, "temperature": 0.0, **PENALTIES, **FILTERS, "mirostat": 0, "logprobs": 0, "stop": (),
    "on_overflow": "error", **dict.fromkeys(CONSTRAINTS),
}  # fmt: skip
"""The same of all that beam search does not go with."""
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
_MOST_BREAKERS, _LONGEST_BREAKER = 32, 40  # characters; llama.cpp cuts longer ones
ON_OVERFLOW = ("error", "shift")

LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
OnProgress = Callable[[str, int, int], object]


class GenerateOptions(TypedDict, total=False):
    """The keywords of generate, stream, chat and their async methods. See Model.generate."""

    max_tokens: int
    min_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    repeat_last_n: int
    no_repeat_ngram_size: int | None
    suppress_tokens: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    stop: str | Sequence[str]
    ignore_eos: bool
    seed: int | None
    logprobs: int
    num_beams: int
    length_penalty: float
    early_stopping: bool
    on_overflow: str
    n_keep: int
    cache_prompt: bool
    lookup: bool
    grammar: str | Grammar | None
    json_schema: Mapping[str, Any] | str | bool | None
    regex: str | None
    choice: Sequence[str] | None
    show_tokens: Container[int]
    logits_processor: LogitsProcessor | None
    on_progress: OnProgress | None


def mirostat_version(name: str, value: Any) -> int:
    """0 or 2. name: of the argument, for the errors. UnsupportedError: 1. ValueError, TypeError: anything else."""
    version = whole(name, value)
    if version == 1:
        raise UnsupportedError(f"{name} 1 is not supported: {name} 2 aims at the same surprise without an estimate")
    if version not in (0, 2):
        raise ValueError(f"{name} must be 0 (none) or 2, got {version}")
    return version


@dataclass(frozen=True)
class Options:
    """The keywords of GenerateOptions with their defaults, checked.

    Raises:
        UnsupportedError: mirostat 1.
        ValueError, TypeError: an option out of its range (the sampler's own are checked in sampler()), of a wrong type,
            or that cannot be combined with another one.
    """

    max_tokens: int = 128
    min_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    no_repeat_ngram_size: int | None = None
    suppress_tokens: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = DRY_SEQUENCE_BREAKERS
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    on_overflow: str = "error"
    n_keep: int = 0
    cache_prompt: bool = False
    lookup: bool = False
    grammar: str | Grammar | None = None
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    show_tokens: Container[int] = ()
    logits_processor: LogitsProcessor | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_ranges()
        self._check_mirostat()
        self._check_beams()
        self._check_constraint()

    def _check_ranges(self) -> None:
        if self.max_tokens < -1:
            raise ValueError(f"max_tokens (-n) must be -1 (no limit but the context) or more, got {self.max_tokens}")
        if self.logprobs < 0:
            raise ValueError(f"logprobs must not be negative, got {self.logprobs}")
        if "" in self.stops:
            raise ValueError("stop: a stop string must not be empty")
        if "" in self.dry_sequence_breakers:
            raise ValueError("dry_sequence_breakers must not be empty texts")
        if (n := len(self.dry_sequence_breakers)) > _MOST_BREAKERS:
            raise ValueError(f"dry_sequence_breakers must be at most {_MOST_BREAKERS} texts, got {n}")
        if (n := max(map(len, self.dry_sequence_breakers), default=0)) > _LONGEST_BREAKER:
            raise ValueError(f"dry_sequence_breakers must have at most {_LONGEST_BREAKER} characters each, one has {n}")
        positive("num_beams", self.num_beams)
        for name in ("min_tokens", "no_repeat_ngram_size"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if 0 <= self.max_tokens < (self.min_tokens or 0):
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.on_overflow not in ON_OVERFLOW:
            raise ValueError(unknown("on_overflow", self.on_overflow, ON_OVERFLOW))
        if self.n_keep < -1:
            raise ValueError(f"n_keep must be -1 (the whole prompt) or more, got {self.n_keep}")
        if self.n_keep and self.on_overflow != "shift":
            raise ValueError(f"n_keep={self.n_keep} says what a shifted context keeps: give on_overflow='shift' too")

    def _check_mirostat(self) -> None:
        if mirostat_version("mirostat", self.mirostat):
            self._refuse_beside("mirostat", FILTERS)

    def _check_beams(self) -> None:
        if self.num_beams > 1:
            self._refuse_beside("num_beams", NOT_WITH_BEAMS)
            return
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) != self._default(name):
                raise ValueError(f"{name}={getattr(self, name)!r} is for beam search: give num_beams too")

    def _check_constraint(self) -> None:
        given = self.constraint
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say what the text is: give one of them")
        for name, value in given.items():
            if beside := [one for one in BANS if getattr(self, one)]:
                raise ValueError(f"{beside[0]} does not go with {name}, which says what the text is: leave out one")
            if self.ignore_eos:
                raise ValueError(f"ignore_eos does not go with {name}, which says where a text ends: leave out one")
            if not isinstance(value, Grammar):
                source_of(name, value)

    def _refuse_beside(self, option: str, plain: Mapping[str, object]) -> None:
        """ValueError: an option that cannot be combined with `option` has a value that is neither its default nor off.

        Args:
            plain: options, with the values that switch them off.
        """
        for name, nothing in plain.items():
            value = self.stops if name == "stop" else getattr(self, name)
            if value not in (nothing, self._default(name)):
                raise ValueError(
                    f"{name}={value!r} does not go with {option}={getattr(self, option)}: leave out one of them"
                )

    def _default(self, name: str) -> object:
        return self.__dataclass_fields__[name].default

    def _check_kinds(self) -> None:
        whole("max_tokens", self.max_tokens)
        for name in ("top_k", "repeat_last_n", "logprobs", "num_beams", "dry_allowed_length",
                     "dry_penalty_last_n", "n_keep"):  # fmt: skip
            count(name, getattr(self, name))
        for name in ("min_tokens", "no_repeat_ngram_size"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name))
        if self.suppress_tokens is not None:
            if isinstance(self.suppress_tokens, str) or not isinstance(self.suppress_tokens, Sequence):
                raise TypeError(f"suppress_tokens must be a sequence of token ids, got {self.suppress_tokens!r}")
            for id in self.suppress_tokens:
                whole("a token id in suppress_tokens", id)
        for name in ("ignore_eos", "early_stopping", "cache_prompt", "lookup"):
            check_switch(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", "typical_p", *PENALTIES, "dry_base", "top_n_sigma",
                     "xtc_probability", "xtc_threshold", "mirostat_tau", "mirostat_eta"):  # fmt: skip
            real(name, getattr(self, name))
        exponent("length_penalty", self.length_penalty)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            name = f"logit_bias of token {whole('a token id in logit_bias', token)}"
            if math.isfinite(real(name, bias)) and abs(bias) > float(np.finfo(np.float32).max):
                raise ValueError(f"{name} is {bias:g}, which no float holds: -100 or -inf bans a token")
        check_seed(self.seed)
        if not isinstance(self.stop, Sequence) or not all(isinstance(stop, str) for stop in self.stops):
            raise TypeError(f"stop must be text, or a sequence of texts, got {self.stop!r}")
        breakers = self.dry_sequence_breakers
        if (
            isinstance(breakers, str)
            or not isinstance(breakers, Sequence)
            or not all(isinstance(b, str) for b in breakers)
        ):
            raise TypeError(f"dry_sequence_breakers must be a sequence of texts, got {breakers!r}")
        if not isinstance(self.show_tokens, Container):
            raise TypeError(f"show_tokens must be a set of token ids, got {self.show_tokens!r}")
        for name in ("logits_processor", "on_progress"):
            check_function(name, getattr(self, name))

    @property
    def constraint(self) -> dict[str, Any]:
        """The constraint on the text as {name: value}, names as in CONSTRAINTS; empty if there is none."""
        return {name: value for name in CONSTRAINTS if (value := getattr(self, name)) is not None}

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def biases(self, ends: Iterable[int]) -> dict[int, float]:
        """Token -> value added to its logit: logit_bias, and -infinity for the end tokens with ignore_eos."""
        return dict(self.logit_bias or {}) | (dict.fromkeys(ends, -math.inf) if self.ignore_eos else {})

    def sampler(self, seed: int, ends: Iterable[int] = (), breakers: Sequence[Sequence[int]] = ()) -> core.Sampler:
        """A sampler with these options. ends: end tokens, for ignore_eos. breakers: dry_sequence_breakers as tokens."""
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
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_breakers=breakers,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            mirostat=self.mirostat,
            mirostat_tau=self.mirostat_tau,
            mirostat_eta=self.mirostat_eta,
        )
