"""llama.cpp's grammars (GBNF) in Lark's syntax, as llguidance reads it.

A terminal is one regular expression, so that its parts may share their beginnings; between terminals the longest match
is taken, and what GBNF would also allow is lost. So every rule that reaches no recursion is a terminal, `root` too.
"""

from __future__ import annotations

import json
import re

from slimrt.errors import GrammarError

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | "(?P<literal>(?:\\.|[^"\\])*)"
    | \[(?P<inverse>\^?)(?P<set>(?:\\.|[^\]\\])*)\]
    | (?P<rule>[\w-]+)\s*::=
    | (?P<name>[\w-]+)
    | \{\s*(?P<least>[0-9]{1,9})\s*(?P<upto>,\s*(?:(?P<most>[0-9]{1,9})\s*)?)?\}
    | (?P<mark>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_DEEPEST = 28  # groups within each other: llguidance takes no more
_TOO_DEEP = f"more than {_DEEPEST} groups or repetitions within each other"
_LETTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|.", re.DOTALL)
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\", r"\"": '"', r"\[": "[", r"\]": "]"}


def lark_of(text: str) -> str:
    """A GBNF grammar in Lark's syntax. GrammarError: it is no GBNF, or a literal has a control character."""
    rules = _rules(text)
    uses = {name: {part[1] for part in parts if isinstance(part, tuple)} for name, parts in rules.items()}
    for name in ("root", *(one for used in uses.values() for one in used)):
        if name not in rules:
            raise GrammarError(f"not GBNF: there is no rule '{name}'")
    regular: set[str] = set()
    while found := {name for name, used in uses.items() if name not in regular and used <= regular}:
        regular |= found

    def lark_name(name: str) -> str:
        plain = f"r{[*rules].index(name)}_" + re.sub(r"\W", "_", name, flags=re.ASCII)  # never `start`, nor one of two
        return plain.upper() if name in regular else plain.lower()

    lines = [f"start: {lark_name('root')}"]
    for name, parts in rules.items():
        words = (lark_name(part[1]) if isinstance(part, tuple) else part for part in parts)
        lines.append(f"{lark_name(name)}: {' '.join(words)}")
    return "\n".join(lines)


def _rules(text: str) -> dict[str, list[str | tuple[str, str]]]:
    """Rule -> its parts in Lark's syntax; a reference to a rule is ("rule", its name)."""
    rules: dict[str, list[str | tuple[str, str]]] = {}
    parts: list[str | tuple[str, str]] = []
    opened: list[int] = []  # where groups begin that are not closed
    at = depth = item = 0  # item: where the last one begins that may be repeated
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is not None:
            depth += (found["mark"] == "(") - (found["mark"] == ")")
        if found is None or (not rules and found.lastgroup not in ("space", "rule")) or depth < 0:
            raise GrammarError(f"not GBNF: line {text.count(chr(10), 0, at) + 1}, {text[at : at + 20]!r}")
        if depth and (found["rule"] is not None or found.end() == len(text)):
            raise GrammarError(f"not GBNF: a ( is not closed in rule '{[*rules][-1]}'")
        at = found.end()
        if found["space"] is not None:
            continue
        if found["rule"] is not None or found["mark"] in ("|", ")"):
            _end_alternative(parts)
        if found["rule"] is not None:
            parts, item = [], 0
            rules[found["rule"]] = parts
            continue
        part = ("rule", found["name"]) if found["name"] is not None else _part(found)
        if part[0] in "*+?{":
            if item >= len(parts) - 1 and parts[item:] in ([], ["("], ["|"]):
                raise GrammarError(f"not GBNF: {found[0]} has nothing to repeat")
            if part == "{0,0}":  # nothing, which Lark has no repetition for
                parts[item:] = ['""']
                continue
            if parts[-1][0] in "*+?{":  # of a repetition, which Lark wants in a group
                if parts[item : item + _DEEPEST] == ["("] * _DEEPEST:
                    raise GrammarError(_TOO_DEEP)
                parts.insert(item, "(")
                parts.append(")")
        else:
            if part == "(":
                if len(opened) == _DEEPEST:
                    raise GrammarError(_TOO_DEEP)
                opened.append(len(parts))
            item = opened.pop() if part == ")" else len(parts)
        parts.append(part)
    _end_alternative(parts)
    return rules


def _end_alternative(parts: list[str | tuple[str, str]]) -> None:
    """Write an alternative of nothing, which Lark does not leave out."""
    if not parts or parts[-1] in ("|", "("):
        parts.append('""')


def _part(found: re.Match[str]) -> str:
    """A token in Lark's syntax, except for names."""
    if found["literal"] is not None:
        return json.dumps("".join(map(_in_literal, _LETTER.finditer(found["literal"]))), ensure_ascii=False)
    if found["set"] is not None:
        return f"/[{found['inverse']}{_ranges(found['set'])}]/"
    if found["least"] is not None:
        least, most = int(found["least"]), found["least"] if found["upto"] is None else found["most"]
        return f"{{{least},{int(most) if most else ''}}}"
    return "/(?s:.)/" if found["mark"] == "." else found["mark"]


def _ranges(inner: str) -> str:
    """What stands in a character class; Rust's have operators, such as &&, that are plain characters in GBNF."""
    letters, made = [*_LETTER.finditer(inner)][::-1], ""
    while letters:
        made += _in_class(letters.pop())
        if len(letters) > 1 and letters[-1][0] == "-":
            letters.pop()
            made += f"-{_in_class(letters.pop())}"
    return made


def _in_class(letter: re.Match[str]) -> str:
    one = _character(letter)
    return one if one > "\x7f" or one.isalnum() else f"\\x{ord(one):02x}"


def _in_literal(letter: re.Match[str]) -> str:
    """A character of a literal. GrammarError: a control character, which Lark's literals do not have."""
    one = _character(letter)
    if one < " " and one not in "\n\r\t" or one == "\x7f":
        raise GrammarError(f"a literal cannot have {letter[0]}: write [{letter[0]}]")
    return one


def _character(letter: re.Match[str]) -> str:
    """The character of an escape, or the one that stands there. GrammarError: there is no such escape or character."""
    digits = letter[1] or letter[2] or letter[3]
    if digits is None:
        if letter[0][0] == "\\" and letter[0] not in _ESCAPES:
            raise GrammarError(f"not GBNF: there is no escape {letter[0]}")
        return _ESCAPES.get(letter[0], letter[0])
    if (number := int(digits, 16)) > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise GrammarError(f"no character has the code {letter[0]}")
    return chr(number)
