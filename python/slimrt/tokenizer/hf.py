"""The tokenizer of a Hugging Face directory: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

import tokenizers
from tokenizers import AddedToken

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.plumbing.files import read_text
from slimrt.tokenizer.vocabulary import Vocabulary, end_of_generation, typed

_MOST_GAPS = 1 << 20  # unused ids below the largest, at most
_POINTER = b"version https://git-lfs."
_SENTENCEPIECE_DECODERS = {"Metaspace", "ByteFallback", "Replace"}


class _Templates(TypedDict):
    chat_template: str | None
    chat_templates: dict[str, str]


def load_directory(directory: Path) -> Vocabulary:
    """Return the vocabulary of a Hugging Face directory.

    Raises:
        UnsupportedError: it has no tokenizer.json, or one of a kind that is not supported.
        ModelFormatError: a file in it is broken.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedError(
            f"{directory} has no tokenizer.json. Make one: "
            "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return load_file(file)


def load_file(path: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json. The files beside it are only read if it has exactly that name.

    Raises:
        UnsupportedError: a decoder that is neither byte-level nor SentencePiece's.
        ModelFormatError: the file, or one beside it, is broken.
    """
    check_fetched(path)
    with typed(f"{path}: not a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The file may switch these on; both would silently change a prompt.
    backend.no_truncation()
    backend.no_padding()

    directory = path.parent if path.name == "tokenizer.json" else None
    config = _read_beside(directory, "tokenizer_config.json")
    named = _read_beside(directory, "special_tokens_map.json")
    named |= {name: value for name, value in config.items() if value is not None}
    with typed(f"{path}: the tokens of tokenizer_config.json do not fit it"):
        _add_declared(backend, named)
    ids = backend.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest > len(ids) + _MOST_GAPS:
        raise ModelFormatError(
            f"{path}: a token has id {largest}, and there are {len(ids)} tokens: the file is damaged"
        )
    tokens: list[str | None] = [None] * (largest + 1)
    for text, id in ids.items():
        tokens[id] = text
    added = backend.get_added_tokens_decoder()
    control = frozenset(id for id, token in added.items() if token.special)
    byte_level, strips_space = decoding(backend, path)
    with typed(f"{path}: its parts do not fit each other"):
        prefix, suffix = _around(backend, tokens)
    special_ids, ends = _special_ids(directory, named, ids)
    # Without the files that name them: a single id added before every text is BOS, a single one after it is EOS.
    for name, around in {"bos": prefix, "eos": suffix}.items():
        if len(around) == 1:
            special_ids.setdefault(name, around[0])
    prefix, suffix = _as_configured(config, special_ids, prefix, suffix)
    return Vocabulary(
        backend=backend,
        tokens=tokens,
        control=control,
        literal=frozenset(added) if byte_level else control,  # SentencePiece writes spaces in added tokens as U+2581
        byte_level=byte_level,
        strips_space=strips_space,
        prefix=prefix,
        suffix=suffix,
        special_ids=special_ids,
        eog_ids=end_of_generation({token.content: id for id, token in added.items()}, [special_ids.get("eos"), *ends]),
        **_chat_templates(directory, config),
    )


def check_fetched(path: Path) -> None:
    """ModelFormatError: git clone left a pointer of Git LFS in place of the file."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ModelFormatError(f"{path} is a pointer of Git LFS, not the file itself: git lfs pull fetches it")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelFormatError if that is not what it holds."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: not a JSON object")
    return value


def read_json_value(path: Path) -> Any:
    """What a JSON file holds. ModelFormatError: it is not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not JSON: {error}") from error


def read_json_if_any(path: Path) -> dict[str, Any]:
    """As read_json; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _read_beside(directory: Path | None, name: str) -> dict[str, Any]:
    return {} if directory is None else read_json_if_any(directory / name)


def _decoders(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield state
    for inner in state.get("decoders", ()):
        yield from _decoders(inner)


def decoding(backend: tokenizers.Tokenizer, path: object) -> tuple[bool, bool]:
    """Whether tokens are byte-level, and whether decoding strips a leading space.

    Raises:
        UnsupportedError: a decoder that is neither byte-level nor SentencePiece's; the message begins with `path`.
    """
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    parts = {part.get("type"): part for part in _decoders(state)}
    if "ByteLevel" in parts:
        return True, False
    if not _SENTENCEPIECE_DECODERS & parts.keys():
        raise UnsupportedError(
            f"{path}: its decoder is {state.get('type', 'missing')}; supported: ByteLevel and SentencePiece's "
            f"({', '.join(sorted(_SENTENCEPIECE_DECODERS))})"
        )
    metaspace = parts.get("Metaspace", {}).get("prepend_scheme", "never")
    return False, metaspace != "never" or parts.get("Strip", {}).get("start", 0) > 0


def _around(backend: tokenizers.Tokenizer, tokens: list[str | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor adds before and after a text, found by encoding one."""
    for text in ("a", *filter(None, tokens)):
        inner = backend.encode(text, add_special_tokens=False).ids
        if inner:
            whole = backend.encode(text, add_special_tokens=True).ids
            start = next(at for at in range(len(whole)) if whole[at : at + len(inner)] == inner)
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    return (), ()


def _add_declared(backend: tokenizers.Tokenizer, named: Mapping[str, Any]) -> None:
    """Register tokens that only the files beside tokenizer.json declare special, with their flags, as transformers
    does. Named tokens that the vocabulary lacks are left out, since a model has no embedding rows for them.

    Raises:
        ValueError: a declared id differs from the one that the vocabulary would assign. Others: malformed declarations.
    """
    special = {str(one["content"] if isinstance(one, dict) else one): one for one in _named_tokens(named)}
    added = {token.content: token.__getstate__() for token in backend.get_added_tokens_decoder().values()}
    matched = {text for text, token in added.items() if token["special"]}
    declared, size = list[AddedToken](), backend.get_vocab_size()
    for id, one in sorted((int(id), one) for id, one in (named.get("added_tokens_decoder") or {}).items()):
        token = _added_token(one, bool(one.get("special")) or one["content"] in matched.union(special))
        if backend.token_to_id(token.content) is None:
            if id != size:
                raise ValueError(f"{token.content!r} has id {id}, and there are {size} tokens before it")
            size += 1
        declared.append(token)
    matched |= {token.content for token in declared}
    declared += [
        _added_token(added.get(text) or (one if isinstance(one, dict) else {"content": text}), True)
        for text, one in special.items()
        if text not in matched and backend.token_to_id(text) is not None
    ]
    for is_special, tokens in groupby(declared, lambda token: token.special):
        (backend.add_special_tokens if is_special else backend.add_tokens)(list(tokens))


def _named_tokens(named: Mapping[str, Any]) -> Iterator[Any]:
    """The tokens that the configuration names or calls special: texts, or objects with a "content"."""
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        yield from filter(None, [named.get(f"{name}_token")])
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = named.get(name) or []
        yield from listed.values() if isinstance(listed, dict) else listed


def _added_token(declared: Mapping[str, Any], special: bool) -> AddedToken:
    flags = {name: bool(declared.get(name)) for name in ("single_word", "lstrip", "rstrip")}
    return AddedToken(
        declared["content"], special=special, normalized=bool(declared.get("normalized", not special)), **flags
    )


def _special_ids(
    directory: Path | None, named: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[dict[str, int], list[int]]:
    """The ids of bos, eos, unk and pad; and all eos ids of the generation settings."""
    settings = _read_beside(directory, "config.json") | _read_beside(directory, "generation_config.json")
    known = set(ids.values())
    found, ends = {}, []
    for name in ("bos", "eos", "unk", "pad"):
        token = named.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        declared = settings.get(f"{name}_token_id")
        listed = declared if isinstance(declared, list) else [declared]
        numbers = [id for id in listed if isinstance(id, int) and id in known]
        if isinstance(text, str) and text in ids:
            found[name] = ids[text]
        elif numbers:
            found[name] = numbers[0]
        if name == "eos":
            ends = numbers
    return found, ends


def _as_configured(
    config: Mapping[str, Any], special_ids: Mapping[str, int], prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Apply add_bos_token and add_eos_token of tokenizer_config.json over the post-processor, as transformers does."""
    bos, eos = special_ids.get("bos"), special_ids.get("eos")
    if bos is not None:
        if config.get("add_bos_token") is True and not prefix:
            prefix = (bos,)
        elif config.get("add_bos_token") is False and prefix == (bos,):
            prefix = ()
    if eos is not None:
        if config.get("add_eos_token") is True and not suffix:
            suffix = (eos,)
        elif config.get("add_eos_token") is False and suffix == (eos,):
            suffix = ()
    return prefix, suffix


def _chat_templates(directory: Path | None, config: Mapping[str, Any]) -> _Templates:
    """The default template: from chat_template.jinja, else chat_template.json, else the configuration (one template, or
    a list of named ones); and the named templates, of that list and of the folder additional_chat_templates."""
    template = _read_beside(directory, "chat_template.json").get("chat_template", config.get("chat_template"))
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found = {item.get("name"): item.get("template") for item in listed if isinstance(item, dict)}
    named = {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
    if directory is not None:
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = _read_text(path)
        if (directory / "chat_template.jinja").is_file():
            named["default"] = _read_text(directory / "chat_template.jinja")
    default = named.pop("default", None)
    return {"chat_template": default, "chat_templates": named}


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        raise ModelFormatError(str(error)) from error
