"""How large the results of a chat template's operations may be: nothing interrupts a single one.

Bounded are operators, padding, formatting, replacing and joining, which make a text of any length of a few characters.
Lists that hold one another many times over are bounded by the time of the template's loops alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

from jinja2 import Environment, TemplateError, pass_environment
from jinja2.filters import do_format, make_attrgetter

LONGEST = 1 << 24
"""Characters that texts together, or items that lists together may have."""

WIDEST = 1 << 16
"""The same where a number says how many, as in repetitions and widths; also the bits of a product or power."""

_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
_FORMATTING = ("format", "format_map")
_WIDE = re.compile(r"%[-+ #0]*\d*\.?\d{5}|\{[^{}]*:[^{}]*\d{5}")  # a width of five digits
_GIVEN = re.compile(r"%[-+ #0]*\d*\.?\*|\{[^{}]*:[^{}]*\{")  # a width that is among the arguments


def narrow(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that formats or pads a value, to at most WIDEST characters: else TemplateError."""

    check = partial(_check_format, "%") if filter is do_format else _check_padding

    @wraps(filter)
    def checked(value: Any, *given: Any, **named: Any) -> Any:
        check(value, (*given, *named.values()))
        return filter(value, *given, **named)

    return checked


def narrow_method(text: Any, name: Any, method: Any) -> Any:
    """The same of a method of a text, and those that replace and join; anything else is returned as it is."""
    if not isinstance(text, str) or name not in (*_PADDING, *_FORMATTING, *_BUILDING):
        return method
    if name in _BUILDING:
        return partial(_BUILDING[name], text)
    check = _check_padding if name in _PADDING else partial(_check_format, "{")

    @wraps(method)
    def checked(*given: Any, **named: Any) -> Any:
        check(text, (*given, *named.values()))
        return method(*given, **named)

    return checked


def joined(*parts: Any) -> str:
    """What the operator ~ makes of its operands."""
    texts = [*map(str, parts)]
    _check("a text", sum(map(len, texts)), LONGEST)
    return "".join(texts)


def replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """jinja2's filter replace, of at most LONGEST characters: else TemplateError."""
    return _replace(str(text), str(old), str(new), -1 if count is None else count)


@pass_environment
def listed(environment: Environment, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """The same of jinja2's filter join."""
    return _join(str(d), map(str, items if attribute is None else map(make_attrgetter(environment, attribute), items)))


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    _check("a text", len(text) + text.count(old) * len(new), LONGEST)
    return text.replace(old, new, count)


def _join(separator: str, items: Iterable[str]) -> str:
    texts = [*items]
    _check("a text", sum(map(len, texts)) + len(texts) * len(separator), LONGEST)
    return separator.join(texts)


_BUILDING: dict[str, Callable[..., str]] = {"replace": _replace, "join": _join}


def _check(what: str, size: int, most: int) -> None:
    if size > most:
        raise TemplateError(f"it makes {what} of more than {most} characters, items or bits")


def _check_padding(text: Any, given: Sequence[Any]) -> None:
    for one in given:
        if isinstance(one, int):
            _check("a text", one, WIDEST)
        elif isinstance(one, str):  # what stands in front of each line
            _check("a text", len(str(text)) * len(one), LONGEST)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _check_sum(left: Any, right: Any) -> None:
    _check("a sum", _length(left) + _length(right), LONGEST)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check("a product", left.bit_length() + right.bit_length(), WIDEST)
    else:
        times = left if isinstance(left, int) else right if isinstance(right, int) else 0
        _check("a product", (_length(left) + _length(right)) * times, WIDEST)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check("a power", left.bit_length() * right, WIDEST)


def _check_format(mark: str, text: Any, given: Any) -> None:
    """mark: what a field begins with. given: what is formatted."""
    if isinstance(text, str):
        plain = text.replace("%%", "")
        _check("a text", WIDEST + 1 if _WIDE.search(plain) else 0, WIDEST)
        values = given if isinstance(given, tuple) else (given,)
        if _GIVEN.search(plain):
            _check_padding("", values)
        texts = [one for value in values for one in (value.values() if isinstance(value, dict) else [value])]
        _check("a text", plain.count(mark) * max(map(_length, texts), default=0), LONGEST)


OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum, "*": _check_product, "**": _check_power, "%": partial(_check_format, "%"),
}  # fmt: skip
"""Checks of the operands of an operator. TemplateError: its result would be too large."""
