"""Compiled chat templates: jinja2 with the extensions of transformers, sandboxed and limited in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slimrt.errors import ChatError
from slimrt.tokenizer.template_sizes import OPERATORS, joined, listed, narrow, narrow_method, replaced

SECONDS = 3.0
"""CPU time that rendering may take. A conversation of thousands of messages takes a tenth of a second."""


class TemplateTimeError(ChatError):
    """Rendering took too long; it must not be tried again."""


class CompiledTemplate:
    """A chat template. ChatError: it is not valid jinja2.

    Attributes:
        reads: names of the variables that it looks up, if only in some conversations.
        unread: those that were given and are not among them, which was said.
    """

    def __init__(self, template: str):
        self._clock = threading.local()  # several threads may render at once
        environment = _Environment(self._tick)
        try:
            tree = environment.parse(template)
            self.unread: set[str] = set()
            self.reads = find_undeclared_variables(tree) - environment.globals.keys()
            _bound(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise ChatError(f"chat template: {error}") from error

    def render(self, **given: Any) -> str:
        """The text for these variables. Raises TemplateTimeError, or any exception, since templates are foreign
        code."""
        self._clock.end = time.thread_time() + SECONDS
        return self._template.render(**given)

    def _tick(self) -> bool:
        if time.thread_time() > self._clock.end:
            raise TemplateTimeError(
                f"chat template: it takes more than {SECONDS:g} s for this conversation: it loops for ever, or for "
                "very long"
            )
        return True


@lru_cache(maxsize=16)
def compiled(template: str) -> CompiledTemplate:
    """A chat template, compiled at the first call. ChatError: it is not valid jinja2."""
    return CompiledTemplate(template)


class _Environment(ImmutableSandboxedEnvironment):
    """The filters and functions available to templates, with bounded results. tick: called at each loop iteration and
    macro call."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, tick: Callable[[], bool]):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters |= {name: narrow(self.filters[name]) for name in ("center", "format", "indent", "tojson")}
        self.filters |= {"join": listed, "replace": replaced}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.tick, self.joined = tick, joined

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        return narrow_method(obj, attribute, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return narrow_method(obj, argument, super().getitem(obj, argument))


def _bound(tree: nodes.Template) -> None:
    """Insert a check of the time into each loop iteration and macro call: nothing else can run without end. Bound
    what ~ makes, which the sandbox does not intercept."""
    for join in list(tree.find_all(nodes.Concat)):
        join.nodes = [nodes.Call(nodes.EnvironmentAttribute("joined"), join.nodes, [], None, None)]
    for node in list(tree.find_all(nodes.Stmt)):
        if not isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            continue
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)  # templates cannot redefine it
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %}, which marks the assistant's text for training; for inference its content in its own scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps as in transformers; jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
