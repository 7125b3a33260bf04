"""The languages of a translation model, which each have a token in its vocabulary."""

from __future__ import annotations

import re

from slimrt.tokenizer.vocabulary import Vocabulary

_SPECIAL = re.compile(r"([a-z]{3}_[A-Z][a-z]{3})|([a-z]{2,3}_[A-Z]{2})|__([a-z]{2,3})__")
_ORDINARY = re.compile(r">>([^<>\s]+)<<")


def languages(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the code of each language, as users write it -> its token id, in the order of the ids.

    NLLB's tokens are the codes (`eng_Latn`), as are mBART's and mBART-50's (`en_XX`); M2M100 writes `__en__` (code
    "en"), and Marian's models of several target languages `>>fra<<` (code "fra"), which is an ordinary token of theirs.
    Empty for a model without (BART, Pegasus, Marian's models of two languages).
    """
    found = {}
    for id, text in enumerate(vocabulary.tokens):
        form = _SPECIAL if id in vocabulary.control else _ORDINARY
        if text and (match := form.fullmatch(text)):
            found[match[match.lastindex or 0]] = id
    return found
