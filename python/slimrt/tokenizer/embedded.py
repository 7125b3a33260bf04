"""The tokenizer of a GGUF that holds it as a tokenizer.json: what encoder-decoders have is none of ggml's vocabularies.

Fields of slimrt's own: tokenizer.huggingface.json, the JSON of the library `tokenizers`; tokenizer.slimrt.prefix and
suffix, ids before and after a text; tokenizer.slimrt.ends, ids that end a text beside eos, eot and eom;
tokenizer.slimrt.language_token (Vocabulary.language_token); and, where the ids of the JSON are not those of the model,
tokenizer.slimrt.aliases: for each of them the id that it stands for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import tokenizers

from slimrt.errors import ModelFormatError
from slimrt.tokenizer.charsmap import exact
from slimrt.tokenizer.fields import Fields, Type
from slimrt.tokenizer.hf import decoding
from slimrt.tokenizer.vocabulary import Vocabulary, end_of_generation, typed

MODEL = "huggingface"
"""The value of tokenizer.ggml.model."""

START = "\ue000"
"""Stands for the first character of tokens that are only found at the beginning of a text, and begins the names of
pieces that are never found in one: a character for private use, which texts do not have."""

_JSON = "tokenizer.huggingface.json"
_PLACES = (None, "first", "last")


def build(fields: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a file with tokenizer.ggml.model = MODEL.

    Args:
        fields: as `slimrt.tokenizer.gguf.read_fields` gives them.

    Raises:
        ModelFormatError: a field is missing, of the wrong kind or contradicts another; the JSON is not a tokenizer.
        UnsupportedError: a tokenizer whose tokens are written neither byte-level nor as SentencePiece's.
    """
    ggml, own = Fields(fields), Fields(fields, "tokenizer.slimrt")
    tokens = ggml.strings("tokens")
    types = ggml.numbers("token_type", len(tokens), default=Type.NORMAL)
    special_ids = ggml.special_ids(len(tokens))
    backend, found = _backend(Fields(fields, "tokenizer.huggingface").text("json") or "")
    aliases = own.ids("aliases", len(tokens))
    ids = _ids(found, aliases, tokens, special_ids.get("unk"))
    added = backend.get_added_tokens_decoder().values()
    control = frozenset(ids[token.content] for token in added if token.special)
    byte_level, strips_space = decoding(backend, _JSON)
    place = own.text("language_token")
    if place not in _PLACES:
        raise ModelFormatError(f"tokenizer.slimrt.language_token is {place!r}, it must be 'first' or 'last'")
    missing = [id for id, text in enumerate(tokens) if types[id] == Type.NORMAL and text not in ids] if aliases else []
    return Vocabulary(
        backend=backend,
        tokens=list(tokens),
        control=control,
        literal=frozenset(ids[token.content] for token in added) if byte_level else control,
        byte_level=byte_level,
        strips_space=strips_space,
        prefix=tuple(own.ids("prefix", len(tokens))),
        suffix=tuple(own.ids("suffix", len(tokens))),
        special_ids=special_ids,
        eog_ids=end_of_generation(
            {token.content: ids[token.content] for token in added},
            [special_ids.get("eos"), *ggml.further_ends(len(tokens)), *own.ids("ends", len(tokens))],
        ),
        chat_template=ggml.chat_template(),
        chat_templates=ggml.chat_templates(),
        aliases={got: ids[text] for text, got in backend.get_vocab().items() if got != ids.get(text, got)},
        unknown_texts={tokens[id]: id for id in missing},
        language_token=place,
        exact_charsmap=True,
    )


def _backend(text: str) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """The tokenizer of a tokenizer.json, and the id in the JSON of each text that it finds.

    The library's Unigram matches special tokens in a text even where they are to be read as text: its pieces for them
    get random names that no text contains, so that only the matcher of added tokens finds them, under ids of its own.
    """
    with typed(f"{_JSON} is not a tokenizer"):
        state = json.loads(text)
        added = {token["content"]: token["id"] for token in state["added_tokens"] if token["content"]}
        special = {token["content"] for token in state["added_tokens"] if token["special"]}
        model, secret = state["model"], secrets.token_hex(16)
        if model["type"] == "Unigram":
            pieces = enumerate(model["vocab"])
            model["vocab"] = [(f"{secret}{id}" if piece in special else piece, score) for id, (piece, score) in pieces]
            text = json.dumps(state)
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        if backend.normalizer is not None:
            exact(backend.normalizer)  # checked here, and put in place by the Tokenizer
        found = {piece: id for piece, id in backend.get_vocab().items() if not piece.startswith(secret)}
    return backend, found | added


def _ids(found: Mapping[str, int], aliases: list[int], tokens: list[str], unknown: int | None) -> dict[str, int]:
    """Text -> id in the model of all that the tokenizer finds in a text; `found` has their ids in the JSON.

    Raises:
        ModelFormatError: the model's token of that id has another text, or there is none.
    """
    if aliases and (unknown is None or len(aliases) <= max(found.values(), default=0)):
        raise ModelFormatError("tokenizer.slimrt.aliases is too short, or there is no unknown token")
    ids = {text: aliases[id] if aliases else id for text, id in found.items()}
    for text, id in ids.items():
        theirs = tokens[id] if id < len(tokens) else None
        if theirs != text and not (aliases and (id == unknown or theirs and START + theirs[1:] == text)):
            raise ModelFormatError(f"token {id} is {text!r} in {_JSON}, but {theirs!r} in tokenizer.ggml.tokens")
    return ids
