"""Checks whether a model can draft for another (speculative decoding), before either is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from slimrt.cache.config import CacheChoice
from slimrt.cache.planner import Planner
from slimrt.errors import UnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING

Draft = str | os.PathLike[str] | ModelSource | None

_LONGER_THAN_WINDOWS = 1 << 24  # tokens

SELF = "self"
"""Value of draft_model: the model drafts for itself, reading only few rows of a long text."""


def check_draft(source: ModelSource, target: ModelSource) -> None:
    """Raises UnsupportedError if the model `source` cannot draft for `target`: they must be text models with the same
    tokens; the message says what differs."""
    check_kind(target, "a draft_model is for")
    check_kind(source, "a draft_model is one of")
    mine, wanted = source.tokenizer.vocabulary, target.tokenizer.vocabulary
    difference = ""
    if len(mine.tokens) != len(wanted.tokens):
        difference = f"it has {len(mine.tokens)} tokens, not {len(wanted.tokens)}"
    elif mine.tokens != wanted.tokens:
        at = next(i for i, pair in enumerate(zip(mine.tokens, wanted.tokens, strict=True)) if pair[0] != pair[1])
        difference = f"its token {at} is {mine.tokens[at]!r}, not {wanted.tokens[at]!r}"
    elif mine.control != wanted.control:
        difference = f"other tokens are control tokens: {sorted(mine.control ^ wanted.control)[:8]}"
    elif mine.special_ids != wanted.special_ids:
        difference = f"its special tokens are {dict(mine.special_ids)}, not {dict(wanted.special_ids)}"
    if difference:
        raise UnsupportedError(
            f"{source.name} cannot draft for {target.name}, their tokenizers differ: {difference}. Give a draft_model "
            "of the same family, or none"
        )


def check_kind(source: ModelSource, what: str) -> None:
    """Raises UnsupportedError if a model does not continue texts. what: start of the message, followed by "models that
    continue texts"."""
    if source.kind != "text":
        raise UnsupportedError(f"{what} models that continue texts: {source.name} is {source.described}")


def with_draft(planner: Planner, draft_model: Draft, progress: bool | None) -> Planner:
    """The planner with the checked draft model: another model, the model itself, or none. Errors as check_draft and
    ModelSource.of."""
    if draft_model == SELF:
        check_kind(planner.source, "a draft_model is for")
    if draft_model is None or draft_model == SELF:
        return replace(planner, by_itself=draft_model is not None)
    draft = ModelSource.of(draft_model, progress)
    check_draft(draft, planner.source)
    return replace(planner, draft=draft)


def refuse_aging(source: ModelSource, modes: Iterable[str]) -> None:
    """Raises UnsupportedError if one of the layers' modes is an aging one, whose rows cannot be truncated when a draft
    token is rejected."""
    if aging := set(modes) & set(AGING):
        raise UnsupportedError(
            f"drafts need rows that can be taken back, those of cache mode {', '.join(sorted(aging))} of "
            f"{source.name} age: choose another cache, or no draft_model"
        )


def refuse_rows_to_fork(planner: Planner, choice: CacheChoice) -> None:
    """Raises UnsupportedError if the model is to draft for itself and a fork could not leave out some of its rows."""
    if not planner.by_itself:
        return
    from slimrt.modelfile.sharing import KEYS  # imported on use: gguf takes long to import

    source = planner.source
    longest = source.n_ctx_limit or _LONGER_THAN_WINDOWS
    layers = replace(planner, n_seqs=1, cache_tokens=0).ask(choice, longest)["layers"]
    why = ""
    if others := sorted({layer["mode"] for layer in layers} - {"kv"}):
        why = f"has those of {', '.join(others)}"
    elif any(layer["max_rows"] < longest for layer in layers):
        why = "has a sliding window"
    elif (
        len(set(source.owners)) < len(layers) and KEYS in source.file.keys() and source.file.value(KEYS) == "unrotated"
    ):
        why = "has keys from before RoPE, which layers share"
    if why:
        raise UnsupportedError(
            f"{source.name} cannot draft for itself (draft_model={SELF!r}): that takes rows of cache mode kv in all "
            f"layers, none behind a window, and it {why}: choose another cache, or no draft_model"
        )
