"""Types of flags for argparse: bounded numbers, sizes, lists. Each raises ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from slimrt.errors import SlimrtError
from slimrt.plumbing.units import parse_bytes

Number = TypeVar("Number", int, float)
_MOST = (1 << 31) - 1  # the engine's integers have 32 bits


def parsed(kind: Callable[[str], Number], text: str, what: str) -> Number:
    """Convert a text; what: the expected kind of value, for the error message."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got '{text}'") from None


def accepted(check: Callable[[str], object]) -> Callable[[str], str]:
    """A type that keeps the text if a function of the library accepts it; the message comes from that function."""

    def text_of(text: str) -> str:
        try:
            check(text)
        except (SlimrtError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return text_of


def whole(low: int, high: int = _MOST) -> Callable[[str], int]:
    """An integer within bounds, both included."""

    def number(text: str) -> int:
        return _within(parsed(int, text, "a whole number"), low, high)

    return number


def real(low: float = -math.inf, high: float | None = None) -> Callable[[str], float]:
    """A finite number within bounds, both included."""

    def number(text: str) -> float:
        value = parsed(float, text, "a number")
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number, got '{text}'")
        return _within(value, low, high)

    return number


def _within(value: Number, low: float, high: float | None) -> Number:
    if value < low == 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
    if high is not None and value > high:
        raise argparse.ArgumentTypeError(f"must be at most {high}, got {value}")
    return value


def or_left_out(kind: Callable[[str], int], *words: str) -> Callable[[str], int | None]:
    """A type for which some words, as llama.cpp has them, mean what leaving the flag out does: None."""
    return lambda text: None if text in words else kind(text)


positive = whole(1)
count = whole(0)
seed = or_left_out(whole(0, (1 << 63) - 1), "-1")
threads = or_left_out(positive, "-1")


def portion(text: str) -> float:
    """A number or a percentage, such as 0.02 or 2%."""
    if text.endswith("%"):
        return parsed(float, text[:-1], "a number or a percentage") / 100
    return parsed(float, text, "a number or a percentage")


def context(text: str) -> int:
    """Tokens of context. 0 is llama.cpp's for all that the model was trained on, which may not fit."""
    if text == "0":
        raise argparse.ArgumentTypeError("must be at least 1, got 0: left out it is the trained one, at most 4096")
    return positive(text)


def gpu_layers(text: str) -> int | None:
    """A number of layers; -1 or all: all of them; auto: None, as if it were left out."""
    return None if text == "auto" else -1 if text == "all" else whole(-1)(text)


def share(text: str) -> float:
    """A portion from 0 (included) to 1 (excluded)."""
    value = portion(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def share_or_auto(text: str) -> float | str:
    """A share, or "auto"."""
    return text if text == "auto" else share(text)


def between(text: str) -> float:
    """A portion above 0 and below 1."""
    value = share(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return value


def bias(text: str) -> tuple[int, float]:
    """A token id and a value to add to its logit: 42=-1.5, or 42-1.5 as in llama.cpp."""
    token, _, value = re.sub(r"^(\d+)([+-])", r"\1=\2", text).partition("=")
    try:
        number = float(value)
        if not math.isnan(number):
            return int(token), number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a token id and a number, such as 42=-1.5 or 42=-inf, got '{text}'")


def not_empty(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def file_name(text: str) -> str:
    """The name of a file to write, which is never stdout."""
    if text == "-":
        raise argparse.ArgumentTypeError("must be the name of a file: this is not written to stdout")
    return not_empty(text)


def lower(text: str) -> str:
    """Names are case-insensitive: Q8_0 is q8_0."""
    return text.lower()


size = accepted(parse_bytes)  # an amount of memory, such as 6GiB


def is_number(word: str) -> bool:
    """Whether a word continues a list of numbers."""
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?(,-?[\d.]+(e-?\d+)?)*", word) is not None and not os.path.exists(word)


def is_cache(word: str) -> bool:
    """Whether a word continues a list of caches: it looks like a cache's name, and no such file exists."""
    slash = r"/(?=(q|b?f|fp)\d)"  # between types only, as in kivi:q4/q2
    name = re.fullmatch(rf"[\w+]{{1,8}}([:,]([^\s/]|{slash})*)?", word, re.I)
    return name is not None and not os.path.exists(word)


def one_of(choices: Iterable[str] | None) -> Callable[[str], str]:
    """One of the choices; None: any text."""
    known = None if choices is None else list(choices)

    def chosen(text: str) -> str:
        if known is not None and text not in known:
            raise argparse.ArgumentTypeError(f"invalid choice: '{text}' (choose from {', '.join(known)})")
        return text

    return chosen
