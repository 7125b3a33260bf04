"""Translation of OpenAI's request options to generate's; what slimrt lacks is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from slimrt.errors import UnsupportedError
from slimrt.generation.options import GenerateOptions, mirostat_version
from slimrt.plumbing.arguments import unknown
from slimrt.plumbing.keywords import refusal

OPTIONS = frozenset(GenerateOptions.__annotations__) - {"max_tokens", "logprobs", "on_progress"}
"""Options of generate with the same name and meaning here."""

_NO_TOOLS = "create_chat_completion has tools"

TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
"""Fields of chat requests that are no options of generate (see tools.py)."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": ((None, []), _NO_TOOLS),
    "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((None, True, False), _NO_TOOLS),
    "functions": ((None, []), _NO_TOOLS),
    "function_call": ((None, "none", "auto"), _NO_TOOLS),
    "suffix": ((None, ""), "models are given what stands before the text alone"),
    "stopping_criteria": ((None,), "stop takes texts"),
    "best_of": ((None, 1), "n gives so many answers, to choose from by their logprobs"),
    "use_beam_search": ((None, False), "num_beams says how many beams, at temperature 0"),
    "tfs_z": ((None, 1.0), "top_p, min_p and typical_p leave out what is unlikely"),
    "modalities": ((None, ["text"]), "answers are texts"),
    "audio": ((None,), "answers are texts"),
    "reasoning_effort": ((None,), "it goes with create_chat_completion"),
    "dimensions": ((None,), "vectors have the model's width"),
}
"""Options that slimrt lacks: the values that are accepted since they ask for nothing, and what to use instead."""


def engine_options(call: str, given: Mapping[str, Any], max_tokens: int | None) -> GenerateOptions:
    """The options of generate for a request. None means the default, like OpenAI's null; for max_tokens: no limit.

    Raises:
        UnsupportedError: an option that slimrt lacks. TypeError: an unknown option.
    """
    options: dict[str, Any] = {"max_tokens": -1 if max_tokens is None else max_tokens}
    for name, value in given.items():
        if name == "response_format":
            options |= response_format(call, value)
        elif name == "mirostat_mode":  # llama-cpp-python's name, which errors have too
            options |= {} if value is None else {"mirostat": mirostat_version(name, value)}
        elif name in OPTIONS:
            options |= {} if value is None else {name: value}
        elif name in REFUSED:
            refuse(call, name, value)
        elif name != "user":  # the user's name is ignored
            raise TypeError(refusal(call, name, OPTIONS | {"max_tokens", "response_format"}))
    if isinstance(bias := options.get("logit_bias"), Mapping):  # keys are strings in JSON
        options["logit_bias"] = {int(id) if isinstance(id, str) else id: value for id, value in bias.items()}
    return cast(GenerateOptions, options)


def response_format(call: str, value: Any) -> dict[str, Any]:
    """The options for OpenAI's response_format. A schema is always enforced, "strict" or not.

    Raises:
        UnsupportedError: a type other than "text", "json_object" and "json_schema".
        TypeError: it is malformed.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{call}: response_format must be a mapping with a type, got {value!r}")
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = value.get("schema")  # an extension of llama.cpp
        return {"json_schema": {"type": "object"} if schema is None else schema}
    if kind != "json_schema":
        formats = ("text", "json_object", "json_schema")
        raise UnsupportedError(f"{call}: {unknown('response_format of type', kind, formats)}")
    wrapper = value.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        raise TypeError(f"{call}: a response_format json_schema has its schema under json_schema.schema, got {value!r}")
    return {"json_schema": schema}


def refuse(call: str, name: str, value: Any) -> None:
    """UnsupportedError, unless the value asks for nothing."""
    nothing, instead = REFUSED[name]
    if value not in nothing:
        raise UnsupportedError(f"{call} does not support {name}={value!r}: {instead}")
