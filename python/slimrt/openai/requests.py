"""What a request in OpenAI's words asks for, in ours; what slimrt lacks is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from slimrt.errors import UnsupportedError
from slimrt.generation.options import GenerateOptions
from slimrt.plumbing.arguments import unknown
from slimrt.plumbing.keywords import refusal

OPTIONS = frozenset(GenerateOptions.__annotations__) - {"max_tokens", "logprobs", "num_beams", "on_progress"}
"""Those of generate that have the same name, and mean the same, here."""

_NO_TOOLS = "create_chat_completion has tools"

TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
"""What chat requests have beside options (tools.py)."""

_RENAMED = {"mirostat_mode": "mirostat"}

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": ((None, []), _NO_TOOLS),
    "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((None, True, False), _NO_TOOLS),
    "functions": ((None, []), _NO_TOOLS),
    "function_call": ((None, "none", "auto"), _NO_TOOLS),
    "suffix": ((None, ""), "models are given what stands before the text alone"),
    "stopping_criteria": ((None,), "stop takes texts"),
    "best_of": ((None, 1), "n gives so many answers, to choose from by their logprobs"),
    "tfs_z": ((None, 1.0), "top_p, min_p and typical_p leave out what is unlikely"),
    "modalities": ((None, ["text"]), "answers are texts"),
    "audio": ((None,), "answers are texts"),
    "reasoning_effort": ((None,), "it goes with create_chat_completion"),
    "dimensions": ((None,), "vectors have the model's width"),
}
"""What others take, the values that ask for nothing, and what to do in its place."""


def engine_options(call: str, given: Mapping[str, Any], max_tokens: int | None) -> GenerateOptions:
    """The options of generate for a request. None is a default, as OpenAI's null is; of max_tokens it is no limit.

    Raises:
        UnsupportedError: something that slimrt lacks. TypeError: what nobody has.
    """
    options: dict[str, Any] = {"max_tokens": -1 if max_tokens is None else max_tokens}
    for given_name, value in given.items():
        name = _RENAMED.get(given_name, given_name)
        if name == "response_format":
            options |= response_format(call, value)
        elif name in OPTIONS:
            options |= {} if value is None else {name: value}
        elif name in REFUSED:
            refuse(call, name, value)
        elif name != "user":  # who asks changes nothing
            raise TypeError(refusal(call, name, OPTIONS | {"max_tokens", "response_format"}))
    if isinstance(bias := options.get("logit_bias"), Mapping):  # JSON's keys are texts
        options["logit_bias"] = {int(id) if isinstance(id, str) else id: value for id, value in bias.items()}
    return cast(GenerateOptions, options)


def response_format(call: str, value: Any) -> dict[str, Any]:
    """The options for OpenAI's response_format; a schema is enforced whether or not it is called strict.

    Raises:
        UnsupportedError: a type that is none of "text", "json_object" and "json_schema".
        TypeError: not as OpenAI has it.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{call}: response_format must be a mapping with a type, got {value!r}")
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's may have one
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
    """UnsupportedError unless the value asks for nothing."""
    nothing, instead = REFUSED[name]
    if value not in nothing:
        raise UnsupportedError(f"{call} does not support {name}={value!r}: {instead}")
