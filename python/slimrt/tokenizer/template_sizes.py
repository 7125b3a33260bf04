"""How large the results of a chat template's operations may be: nothing interrupts a single one.

Bounded are operators, padding and formatting, which make a text of any length of a few characters. What a template
makes of many long texts, such as by joining them, is bounded by the time of its loops alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from jinja2 import TemplateError
from jinja2.filters import do_format

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

    check = _check_format if filter is do_format else _check_padding

    @wraps(filter)
    def checked(value: Any, *given: Any, **named: Any) -> Any:
        check(value, (*given, *named.values()))
        return filter(value, *given, **named)

    return checked


def narrow_method(text: Any, name: Any, method: Any) -> Any:
    """The same of a method of a text; anything else is returned as it is."""
    if not isinstance(text, str) or name not in (*_PADDING, *_FORMATTING):
        return method
    check = _check_padding if name in _PADDING else _check_format

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


def _check(what: str, size: int, most: int) -> None:
    if size > most:
        raise TemplateError(f"it makes {what} of more than {most} characters, items or bits")


def _check_padding(text: Any, given: Sequence[Any]) -> None:
    for one in given:
        if isinstance(one, int):
            _check("a text", one, WIDEST)


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


def _check_format(text: Any, given: Any) -> None:
    """given: what is formatted."""
    if isinstance(text, str):
        plain = text.replace("%%", "")
        _check("a text", WIDEST + 1 if _WIDE.search(plain) else 0, WIDEST)
        if _GIVEN.search(plain):
            _check_padding(text, given if isinstance(given, tuple) else (given,))


OPERATORS = {"+": _check_sum, "*": _check_product, "**": _check_power, "%": _check_format}
"""Checks of the operands of an operator. TemplateError: its result would be too large."""
