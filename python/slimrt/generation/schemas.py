"""JSON schemas rewritten so that llguidance enforces them: its integers have 64 bits and its bounds are doubles, and
values beyond that crash the process or exhaust the memory."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from slimrt.errors import GrammarError

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

_LIMIT = (1 << 63) - 1024
"""The largest double below 2^63."""

_MOST_MULTIPLE = 100_000
"""llguidance enforces multipleOf n by an automaton of n states, some 400 bytes each."""

_MERGING = {"allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef"}
"""Keywords that apply several schemas to one value."""

_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"const", "enum", "default", "examples"}

_BLOCK = re.compile(r"%json(?:\s|(?://|#)[^\n]*\n)*(?=\{)")


@contextmanager
def named(what: str) -> Iterator[None]:
    """A GrammarError of what is done in it says first what is wrong, such as the name of an option."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{what}: {error}") from None


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with bounds that llguidance can represent, never wider than given; bounds that exclude nothing go.

    Raises:
        GrammarError: a bound, a multipleOf or a tuple that cannot be enforced; a schema nested too deep.
    """
    try:
        _check_multiples(schema)
        _check_tuples(schema)
        bounded: dict[str, Any] = _bounded(schema)
    except RecursionError:
        raise GrammarError("the schema is nested too deep") from None
    return bounded


def _check_multiples(schema: Mapping[str, Any]) -> None:
    """GrammarError: a multipleOf is too large, or the least common multiple of several that may apply together."""
    multiples = [_digits(value) for name, value in _numbers(schema) if name == "multipleOf"]
    merges = any(name in _MERGING for name, _ in _entries(schema))
    most = math.lcm(*multiples) if merges else max(multiples, default=1)
    if most > _MOST_MULTIPLE:
        what = "the multipleOf of a number, taken together, are" if merges and len(multiples) > 1 else "multipleOf is"
        raise GrammarError(f"{what} {most}, and at most {_MOST_MULTIPLE} can be enforced")


def _check_tuples(value: Any, of_names: bool = False) -> None:
    """GrammarError: additionalItems (before draft 2020-12) beside prefixItems, which llguidance would ignore.
    of_names: as in _bounded."""
    if isinstance(value, Mapping):
        if not of_names and "prefixItems" in value and "additionalItems" in value:
            raise GrammarError("additionalItems means nothing beside prefixItems: say what follows these in items")
        for name, inner in value.items():
            if of_names or name not in _DATA:
                _check_tuples(inner, not of_names and name in _NAMES)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            _check_tuples(inner)


def enforceable_blocks(lark: str) -> str:
    """A Lark grammar with its %json schemas made enforceable. GrammarError: one cannot be, or is not JSON."""
    made, at = [], 0
    for found in _BLOCK.finditer(lark):
        if found.start() < at:  # within a schema
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"what follows %json is no JSON: {error}") from None
        made += [lark[at : found.end()], json.dumps(enforceable(schema))]
        at = end
    return "".join([*made, lark[at:]])


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All (name, value) pairs of mappings, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield name, inner
            yield from _entries(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _entries(inner)


def _numbers(schema: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in _entries(schema) if _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _digits(multiple: Any) -> int:
    """The digits of a decimal number as an integer, without the point and trailing zeros."""
    number = Decimal(repr(multiple)) if math.isfinite(multiple) else Decimal(1)
    return int("".join(map(str, number.normalize().as_tuple().digits))) or 1


def _bounded(value: Any, of_names: bool = False) -> Any:
    """A schema with its bounds replaced. of_names: `value` maps names to schemas, so its keys are no keywords."""
    if isinstance(value, Mapping):
        made = {}
        for name, inner in value.items():
            is_bound = not of_names and name in (*_LOWER, *_UPPER) and _is_number(inner)
            bound = _bound(name, inner) if is_bound else _bounded(inner, not of_names and name in _NAMES)
            if not of_names and name in _DATA and bound != inner:
                raise GrammarError(f"{name} has bounds that cannot be enforced, where it is referred to as a schema")
            if bound is not None or inner is None:
                made[name] = bound
        return made
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_bounded(inner) for inner in value]
    return value


def _bound(name: str, bound: Any) -> Any:
    """A bound that llguidance can represent; None: it excludes nothing. GrammarError: there is none."""
    sign = -1 if name in _LOWER else 1  # the direction of the excluded numbers
    size = sign * bound
    if size >= sys.float_info.max:
        return None
    if _LIMIT < size <= 1 << 64:  # the limits of 64-bit integers, signed or not
        return sign * _LIMIT
    if abs(size) > _LIMIT:
        raise GrammarError(f"{name} is {bound}: numbers beyond 2^63 are not told apart, and cannot be bounds")
    nearest = float(size)
    return sign * int(math.nextafter(nearest, -math.inf)) if nearest > size else bound
