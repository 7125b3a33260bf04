"""Which models may draft for which, before any of them is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from slimrt.cache.planner import Planner
from slimrt.errors import UnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING

Draft = str | os.PathLike[str] | ModelSource | None

SELF = "self"
"""As draft_model: the model itself, which reads few rows of a long text for its guesses."""


def check_draft(source: ModelSource, target: ModelSource) -> None:
    """UnsupportedError: a model that cannot draft for the target, because tokens are not the same; says which."""
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
    """UnsupportedError: a model that does not continue texts. what: the sentence says of those that do."""
    if source.kind != "text":
        raise UnsupportedError(f"{what} models that continue texts: {source.name} is a {source.kind} model")


def with_draft(planner: Planner, draft_model: Draft, progress: bool | None) -> Planner:
    """A planner that knows what drafts for its model: a model, checked, itself, or nothing. Errors as check_draft and
    ModelSource.of."""
    if draft_model == SELF:
        check_kind(planner.source, "a draft_model is for")
    if draft_model is None or draft_model == SELF:
        return replace(planner, by_itself=draft_model is not None)
    draft = ModelSource.of(draft_model, progress)
    check_draft(draft, planner.source)
    return replace(planner, draft=draft)


def refuse_aging(source: ModelSource, modes: Iterable[str]) -> None:
    """UnsupportedError: rows of a model in these modes of its layers age, and cannot be taken back where a guess was
    wrong."""
    if aging := set(modes) & set(AGING):
        raise UnsupportedError(
            f"drafts need rows that can be taken back, those of cache mode {', '.join(sorted(aging))} of "
            f"{source.name} age: choose another cache, or no draft_model"
        )
