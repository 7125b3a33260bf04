"""How a text goes into an encoder-decoder and how its output begins, which languages are part of in many models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from slimrt.runtime.runtime import Runtime
from slimrt.tokenizer.tokenizer import Tokenizer

_FORCED = "slimrt.text2text.forced_bos_token_id"
_SHOWN = 6  # languages in a message


@dataclass(frozen=True)
class Translation:
    """Translation from one language to another.

    Attributes:
        ids: text -> the encoder's ids. ValueError: the text has to name a language and does not.
        first: ids that outputs begin with.
    """

    ids: Callable[[str], list[int]]
    first: list[int]


def translation(runtime: Runtime, source: str | None, target: str | None) -> Translation:
    """Return how a model translates.

    T5 reads the languages in front of the text ("translate English to German: "). mBART, M2M100 and NLLB have a token
    for each: the source's beside the text, the target's first in the output. Marian's models of several target
    languages read the target's token in front of the text. Other models know one way to go.

    Args:
        source, target: languages as the model calls them (see `slimrt.tokenizer.languages`; where no other begins so,
            what is before the "_" suffices); None: not named.

    Raises:
        ValueError: the model needs a language that is not named, or does not know it.
    """
    tokenizer, first = runtime.source.tokenizer, first_ids(runtime)
    known = tokenizer.languages
    if tokenizer.vocabulary.language_token:
        if source is None or target is None:
            raise ValueError(f"name both languages, source and target: this model needs them, such as {_some(known)}")
        beside, to = _id_of("source", source, known), _id_of("target", target, known)
        starts = f"{runtime.source.architecture}.decoder_starts_with_language"
        file = runtime.source.file
        first = [to] if starts in file.keys() and file.value(starts) else [first[0], to]
        if tokenizer.vocabulary.language_token == "last":
            return Translation(lambda text: [*_inside(tokenizer, text), beside], first)
        return Translation(lambda text: [beside, *_inside(tokenizer, text)], first)
    if known:
        return Translation(_in_front(tokenizer, known, source, target), first)
    if runtime.source.architecture == "t5":
        if (source is None) != (target is None):
            raise ValueError(
                "name both languages, source and target, or neither (then the text says itself what to do)"
            )
        before = "" if source is None else f"translate {source} to {target}: "
        return Translation(lambda text: tokenizer.encode(before + text), first)
    if source is not None or target is not None:
        raise ValueError("this model knows no languages by name: leave source and target out")
    return Translation(tokenizer.encode, first)


def first_ids(runtime: Runtime) -> list[int]:
    """The ids that outputs begin with: the decoder's start, and the token that the model's settings put after it."""
    file = runtime.source.file
    start = [int(runtime.info["decoder_start_token_id"])]
    return [*start, int(file.value(_FORCED))] if _FORCED in file.keys() else start


def source_ids(runtime: Runtime, text: str) -> list[int]:
    """The encoder's ids for a text. ValueError: the model's texts have a language beside them, or a target in front."""
    tokenizer = runtime.source.tokenizer
    if tokenizer.vocabulary.language_token:
        raise ValueError("a text of this model is in a language, which has to be named: translate it, or give its ids")
    known = tokenizer.languages
    return _in_front(tokenizer, known, None, None)(text) if known else tokenizer.encode(text)


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's ids and the end, without a language."""
    return [*tokenizer.encode(text, False), *tokenizer.vocabulary.suffix]


def _in_front(
    tokenizer: Tokenizer, known: Mapping[str, int], source: str | None, target: str | None
) -> Callable[[str], list[int]]:
    """As Translation.ids, for a model that reads its target language in front of the text."""
    if source is not None:
        raise ValueError("this model sees by itself which language a text is in: name the target alone")
    name = None if target is None else next(one for one, id in known.items() if id == _id_of("target", target, known))

    def ids(text: str) -> list[int]:
        text = text.lstrip()  # only the very beginning of a text may be a code
        if name is None and not any(text.startswith(f">>{one}<<") for one in known):
            raise ValueError(
                f"name the target language, such as {_some(known)}, as translate's target or in front of the text: "
                f">>{next(iter(known))}<< {text:.20}"
            )
        return tokenizer.encode(text if name is None else f">>{name}<< {text}")

    return ids


def _id_of(name: str, language: str, known: Mapping[str, int]) -> int:
    """The id of a language's token. name: of the argument. ValueError: none, or several that begin so."""
    matching = [one for one in known if one == language] or [one for one in known if one.split("_")[0] == language]
    if len(matching) == 1:
        return known[matching[0]]
    near = matching or get_close_matches(language, known, _SHOWN, 0.5) or known
    raise ValueError(
        f"{name}: the model knows no language {language!r}; of the {len(known)} that it knows: {_some(near)}"
    )


def _some(languages: Collection[str]) -> str:
    return ", ".join(list(languages)[:_SHOWN]) + (", ..." if len(languages) > _SHOWN else "")
