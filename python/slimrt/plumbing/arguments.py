"""Checks of argument types, so that a wrong argument is named where it was passed."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

DEEPEST = 100  # levels of what templates and schemas are given


def whole(name: str, value: Any) -> int:
    """An integer, NumPy's included. TypeError: anything else."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None


def count(name: str, value: Any) -> int:
    """An integer that fits int32, as the engine's do. TypeError, ValueError."""
    if not -(1 << 31) <= whole(name, value) < 1 << 31:
        raise ValueError(f"{name} must be less than 2^31, got {value}")
    return whole(name, value)


def positive(name: str, value: Any) -> int:
    """An integer of at least 1. TypeError, ValueError."""
    if whole(name, value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return whole(name, value)


def real(name: str, value: Any) -> float:
    """A number, NumPy's included. TypeError: anything else. ValueError: NaN, or too large for a float."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float holds, got a larger one") from None
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan")
    return number


def exponent(name: str, value: Any) -> float:
    """A number to whose power lengths can be raised. TypeError: anything else. ValueError: NaN, or out of range."""
    if not -40 <= real(name, value) <= 40:  # 10^7 tokens to the power of 40 are still a float
        raise ValueError(f"{name} must be from -40 to 40, got {value}")
    return float(value)


def check_switch(name: str, value: Any) -> None:
    """TypeError unless the value is a bool, NumPy's included, or None."""
    if value is not None:
        check_bool(name, value)


def check_bool(name: str, value: Any) -> None:
    """TypeError unless the value is a bool, NumPy's included."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be true or false, got {value!r}")


def check_seed(seed: Any) -> None:
    """TypeError, ValueError unless the seed is None, -1, or from 0 to 2^63 - 1."""
    if seed is not None and not -1 <= whole("seed", seed) < 1 << 63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, or -1 (a new one), got {seed}")


def check_function(name: str, value: Any) -> None:
    """TypeError unless the value is None or callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")


def is_deeper(value: Any, most: int) -> bool:
    """Whether mappings and lists are nested more than `most` deep, which recursion along them might not bear."""
    level = [value]
    for _ in range(most):
        level = [inner for one in level if isinstance(one, (Mapping, list, tuple))
                 for inner in (one.values() if isinstance(one, Mapping) else one)]  # fmt: skip
    return any(isinstance(one, (Mapping, list, tuple)) for one in level)


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The error message for an unknown name, with the most similar known one."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    hint = f" (did you mean '{nearest[0]}'?)" if nearest else ""
    return f"{what} '{name}' is not supported{hint}; supported: {', '.join(known)}"
