"""Which models may draft for which, before any of them is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from slimrt.errors import UnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING


def check_draft(source: ModelSource, target: ModelSource) -> None:
    """UnsupportedError: a model that cannot draft for the target, because tokens are not the same; says which."""
    for one, what in ((target, "a draft_model is for"), (source, "a draft_model is one of")):
        if one.kind != "text":
            raise UnsupportedError(f"{what} models that continue texts: {one.name} is a {one.kind} model")
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


def refuse_aging(source: ModelSource, modes: Iterable[str]) -> None:
    """UnsupportedError: rows of a model in these modes of its layers age, and cannot be taken back where a guess was
    wrong."""
    if aging := set(modes) & set(AGING):
        raise UnsupportedError(
            f"drafts need rows that can be taken back, those of cache mode {', '.join(sorted(aging))} of "
            f"{source.name} age: choose another cache, or no draft_model"
        )
