"""The tokenizer of a GGUF file, built from its metadata fields."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.tokenizer import embedded, pretokenizers
from slimrt.tokenizer.charsmap import Charsmap
from slimrt.tokenizer.fields import Fields, Type
from slimrt.tokenizer.vocabulary import END_OF_TURN, SPACE, Vocabulary, end_of_generation

METASPACE = "tokenizer.slimrt.metaspace"
"""A field of slimrt's own: where the original tokenizer.json prepends a space: to the "first" word of a text, or
"always", that is after control tokens too. Plain GGUF readers, which do not know it, always prepend one."""
ADDED, ADDED_FLAGS = "tokenizer.slimrt.added", "tokenizer.slimrt.added_flags"
"""Fields of slimrt's own: ids of the tokens that the original tokenizer.json finds in a text before its model splits
it, and how it finds each: bits, by their places in FLAGS. GGUF itself cannot say that."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_SENTINELS = (100, 300)  # of T5, of UMT5
_MODELS = ("llama", "gpt2", "t5", "gemma4", embedded.MODEL)


def read_fields(file: core.GgufFile) -> dict[str, Any]:
    """Return the `tokenizer.*` fields and `general.architecture` of a GGUF file.

    Raises:
        ModelFormatError: a text in them is not UTF-8.
    """
    fields = file.fields("tokenizer.") | file.fields("general.architecture")
    try:
        return {key: _decoded(value) for key, (_, _, value) in fields.items()}
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{file.path}: corrupted GGUF header: {error}") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [text.decode() for text in value]
    return value.decode() if isinstance(value, bytes) else value


def read_file(path: Path) -> dict[str, Any]:
    """`read_fields` of a file, which may be only a vocabulary; its tensors may be of any type.

    Raises:
        ModelFormatError: not a GGUF file, another version, truncated or corrupted.
    """
    try:
        return read_fields(core.GgufFile(str(path), tensors=False))
    except UnsupportedError as error:
        raise ModelFormatError(f"{path}: not a GGUF version that slimrt reads: {error}") from error


def build(fields: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary that a GGUF's fields describe.

    Args:
        fields: as `read_fields` gives them.

    Raises:
        ModelFormatError: a field is missing, of the wrong kind or contradicts another.
        UnsupportedError: an unknown tokenizer model or pre-tokenizer.
    """
    ggml, own = Fields(fields), Fields(fields, "tokenizer.slimrt")
    model = ggml.text("model")
    if model not in _MODELS:
        what = "no tokenizer" if model in (None, "no_vocab") else f"the unknown tokenizer {model!r}"
        raise UnsupportedError(
            f"the GGUF has {what} (tokenizer.ggml.model); supported: {', '.join(_MODELS)} (SentencePiece, BPE, unigram)"
        )
    if model == embedded.MODEL:
        return embedded.build(fields)
    tokens = ggml.strings("tokens")
    types = _types(ggml, tokens, spelled=ADDED in fields)
    if model == "t5":
        tokens, types = _with_sentinels(tokens, types)
    special_ids = _special_ids(ggml, tokens, types, sentencepiece=model != "gpt2")
    space_prefix = model != "gpt2" and ggml.flag("add_space_prefix", model != "gemma4")

    arch = fields.get("general.architecture", "")
    pre = pretokenizers.lookup(ggml.text("pre"), arch, len(tokens)) if model == "gpt2" else None
    try:
        if pre:
            backend = _bpe(tokens, ggml.strings("merges"), pre)
        elif model == "llama":
            backend = _sentencepiece(tokens, ggml.numbers("scores", len(tokens)), types, space_prefix)
            if scheme := fields.get(METASPACE):
                backend.normalizer = None
                backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        elif model == "gemma4":
            backend = _characters(tokens, _pairs(ggml.strings("merges")), types, space_prefix)
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        else:
            backend = _unigram(tokens, types, special_ids, space_prefix, ggml)
    except (ModelFormatError, UnsupportedError):
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for whatever it refuses
        raise ModelFormatError(f"the GGUF's {model!r} vocabulary is inconsistent: {error}") from error

    by_type = {kind: [id for id, value in enumerate(types) if value == kind] for kind in Type}
    control = frozenset(by_type[Type.CONTROL])
    spelled = by_type[Type.UNKNOWN] + (by_type[Type.USER_DEFINED] if model == "gpt2" else [])
    flags = _flags(own, fields, tokens)
    aliases = _add_special(backend, tokens, sorted(control) + by_type[Type.UNKNOWN], flags, special=True)
    aliases |= _add_special(backend, tokens, by_type[Type.USER_DEFINED], flags, special=False)
    default_bos = pre.add_bos if pre else model in ("llama", "gemma4")
    return Vocabulary(
        backend=backend,
        tokens=list(tokens),
        control=control,
        literal=control.union(spelled),
        byte_level=model == "gpt2",
        strips_space=space_prefix,
        prefix=_around("bos", ggml, special_ids, default_bos, always=model == "gemma4"),
        suffix=_around("eos", ggml, special_ids, model == "t5"),
        special_ids=special_ids,
        eog_ids=end_of_generation(
            {tokens[id]: id for id in control.union(by_type[Type.USER_DEFINED])},
            [special_ids.get("eos"), *ggml.further_ends(len(tokens)), *own.ids("ends", len(tokens))],
        ),
        chat_template=ggml.chat_template(),
        aliases=aliases,
        chat_templates=ggml.chat_templates(),
        exact_charsmap=True,
    )


def _types(ggml: Fields, tokens: list[str], spelled: bool) -> list[int]:
    """The type of each token. Ends of turns are control tokens: the first files of Gemma and others call them normal,
    which no text would match. spelled: the file says itself which tokens are found in a text."""
    types = ggml.numbers("token_type", len(tokens), default=Type.NORMAL)
    if spelled:
        return types
    plain = (Type.NORMAL, Type.UNUSED)
    return [Type.CONTROL if t in plain and text in END_OF_TURN else t for t, text in zip(types, tokens, strict=True)]


def _with_sentinels(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Tokens and types with the sentinels of T5 or UMT5, which llama.cpp's converter does not know: behind the pieces
    it writes [PADn] for all rows of the embedding, the next multiple of 128 above pieces and sentinels."""
    begin, n = len(tokens), len(tokens)
    while begin and types[begin - 1] == Type.UNUSED and tokens[begin - 1] == f"[PAD{begin - 1}]":
        begin -= 1
    count = next((one for one in _SENTINELS if n == -(-(begin + one) // 128) * 128), 0)
    if not count or any("<extra_id_" in text for text in tokens):
        return tokens, types
    named = [f"<extra_id_{i}>" for i in reversed(range(count))]
    end = begin + count
    return tokens[:begin] + named + tokens[end:], types[:begin] + [Type.CONTROL] * count + types[end:]


def _special_ids(ggml: Fields, tokens: list[str], types: list[int], sentencepiece: bool) -> dict[str, int]:
    """The ids of bos, eos, unk and pad: as declared; else, for SentencePiece, by their usual names."""
    fallback = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"} if sentencepiece else {}
    found = ggml.special_ids(len(tokens))
    for name, text in fallback.items():
        if name not in found and text in tokens and types[tokens.index(text)] in (Type.CONTROL, Type.UNKNOWN):
            found[name] = tokens.index(text)
    return found


def _around(
    name: str, ggml: Fields, special_ids: Mapping[str, int], default: bool, *, always: bool = False
) -> tuple[int, ...]:
    """The ids added at one end of a text: BOS or EOS, if the file says so, or by `default` if it says nothing. always:
    ignore the file's add_bos_token, since files of this model have it wrong (as llama.cpp does for Gemma 4)."""
    usual = default and name in special_ids
    wanted = usual if always else ggml.flag(f"add_{name}_token", usual)
    if wanted and name not in special_ids:
        raise ModelFormatError(f"tokenizer.ggml.add_{name}_token is true, but the file declares no {name} token")
    return (special_ids[name],) if wanted else ()


def strips_unsaid(arch: str, model: str) -> bool:
    """Whether special tokens strip the white space after them where the file does not say it: those of Phi-3 and
    Phi-3.5-MoE, in whose tokenizer.json most do."""
    return arch in ("phi3", "phimoe") and model == "llama"


def _flags(own: Fields, fields: Mapping[str, Any], tokens: list[str]) -> dict[str, frozenset[int]]:
    """FLAGS -> the tokens that have them."""
    ids = own.ids("added", len(tokens))
    of_each = list(zip(ids, own.numbers("added_flags", len(ids)), strict=True))
    flags = {name: frozenset(id for id, bits in of_each if int(bits) >> at & 1) for at, name in enumerate(FLAGS)}
    arch, model = fields.get("general.architecture", ""), fields.get("tokenizer.ggml.model", "")
    if model == "t5":  # its normalizer puts a space in front, which a token within a text does not have
        flags["normalized"] = frozenset()
    if not ids and strips_unsaid(arch, model):
        keep = ("<unk>", "<s>", "<|endoftext|>")
        flags["rstrip"] = frozenset(id for id, text in enumerate(tokens) if text not in keep)
    return flags


def _add_special(
    backend: tokenizers.Tokenizer,
    tokens: list[str],
    ids: list[int],
    flags: Mapping[str, frozenset[int]],
    special: bool,
) -> dict[int, int]:
    """Register tokens to be matched whole in a text, before the model splits it.

    Returns:
        Ids that the backend invents for tokens that its model hides (see `_unigram`) -> their true ids.
    """
    added = {tokens[id]: id for id in reversed(ids) if tokens[id]}
    backend.add_tokens(
        [
            AddedToken(text, special=special, **{name: id in those for name, those in flags.items()})
            for text, id in added.items()
        ]
    )
    found = {backend.token_to_id(text): id for text, id in added.items()}
    return {got: id for got, id in found.items() if got is not None and got >= len(tokens)}


def _first_ids(tokens: list[str]) -> dict[str, int]:
    """Text -> id; the first id where a text occurs twice."""
    return {text: id for id, text in reversed(list(enumerate(tokens)))}


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)  # from 1: the left side may itself be a space
        if cut < 0:
            raise ModelFormatError(f"the merge {merge!r} has no space between its two sides")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _bpe(tokens: list[str], merges: list[str], pre: pretokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    pairs = _pairs(merges)
    backend = tokenizers.Tokenizer(models.BPE(_first_ids(tokens), pairs, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre.splitter
    if pre.normalizer:
        backend.normalizer = pre.normalizer
    return backend


def _space_escape(prefix: bool) -> list[normalizers.Normalizer]:
    """SentencePiece's replacement of spaces, with one more before a text that is not empty if `prefix`."""
    return [normalizers.Prepend(SPACE)] * prefix + [normalizers.Replace(" ", SPACE)]


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE, which merges the adjacent pair whose union has the best score: each way to cut
    a token into two tokens, ranked by the token's score."""
    return [
        (text[:cut], text[cut:])
        for text in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]


def _sentencepiece(
    tokens: list[str], scores: list[float], types: list[int], space_prefix: bool
) -> tokenizers.Tokenizer:
    normal = {text: scores[id] for id, text in enumerate(tokens) if types[id] == Type.NORMAL}
    return _characters(tokens, merges_by_score(normal), types, space_prefix)


def _characters(
    tokens: list[str], merges: list[tuple[str, str]], types: list[int], space_prefix: bool
) -> tokenizers.Tokenizer:
    """BPE over characters, with SentencePiece's spaces, and byte tokens for unknown characters."""
    unknown = next((tokens[id] for id, kind in enumerate(types) if kind == Type.UNKNOWN), None)
    model = models.BPE(_first_ids(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(_space_escape(space_prefix))
    return backend


def _unigram(
    tokens: list[str], types: list[int], special_ids: Mapping[str, int], space_prefix: bool, ggml: Fields
) -> tokenizers.Tokenizer:
    """SentencePiece's unigram model: the segmentation with the best total score."""
    if "unk" not in special_ids:
        raise ModelFormatError("a unigram vocabulary needs an unknown token (tokenizer.ggml.unknown_token_id)")
    # The library's Unigram matches every piece in a text, control tokens too. These get random names that no text
    # contains, so that only the matcher of added tokens finds them; and score 0: the score of an unknown character
    # comes from the lowest score of all pieces, and padding rows have very low ones.
    hidden = secrets.token_hex(16)
    pieces = [
        (text, score) if types[id] in (Type.NORMAL, Type.USER_DEFINED, Type.BYTE) else (f"{hidden}{id}", 0.0)
        for id, (text, score) in enumerate(zip(tokens, ggml.numbers("scores", len(tokens)), strict=True))
    ]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, special_ids["unk"], Type.BYTE in types))
    charsmap = ggml.bytes("precompiled_charsmap")
    steps: list[normalizers.Normalizer] = []
    if charsmap:
        Charsmap(charsmap)  # checked here, and put in place by the Tokenizer
        steps = [normalizers.Precompiled(charsmap)]
    if ggml.flag("remove_extra_whitespaces", True):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps + _space_escape(space_prefix))
    return backend
