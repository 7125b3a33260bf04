# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory's tokenizer as GGUF fields.

The result is tried on a text before it is accepted: it must give the ids that the directory's own tokenizer gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, TokenType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import array, boolean, string, uint32
from slimrt.modelfile.hf import vocabulary_pieces, vocabulary_seq2seq
from slimrt.modelfile.hf.sentencepiece_model import read_scores
from slimrt.modelfile.hf.vocabulary_unigram import SENTENCEPIECE_FILES, sentencepiece_fields, unigram_kind
from slimrt.modelfile.hf.vocabulary_whisper import is_special, with_timestamps
from slimrt.tokenizer import gguf, pretokenizers
from slimrt.tokenizer.hf import read_json
from slimrt.tokenizer.tokenizer import Tokenizer
from slimrt.tokenizer.vocabulary import SPACE, Vocabulary

# Where two names mean the same splitting, the one that llama.cpp uses for the families here.
_PREFERRED = ("gpt-2", "llama-bpe", "qwen2", "smollm", "tekken", "gpt-4o", "dbrx")
_OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json")  # no tokenizer.json
_NO_VOCABULARY = {"tokenizer.ggml.model": string("no_vocab")}
_PROBE = (
    "Hello world!  It's the 3rd of MAY 2024, 12345.678 + 9 = ?\n\n\tdef f(x):\n        return x**2  # naïve café\r\n"
    "we'll, THEY'RE don't; Größe, Ελλάδα, привет мир, 你好世界, こんにちは, 한국어, عربى, हिन्दी, "
    "e\u0301 \u212b \U0001f642\U0001f469\u200d\U0001f467  … «x»   "
)


def vocabulary_fields(directory: Path, arch: str, n_vocab: int) -> tuple[dict[str, GGUFValue], list[str]]:
    """Return the `tokenizer.*` fields for a directory's tokenizer, and warnings.

    Args:
        directory: a Hugging Face directory; without tokenizer files the model works by token ids ("no_vocab").
        arch: GGUF architecture.
        n_vocab: rows of the token embedding; unused ones get placeholders.

    Raises:
        UnsupportedError: a tokenizer that GGUF cannot express; nothing is guessed.
        ModelFormatError: a broken file.
    """
    if arch in vocabulary_seq2seq.ARCHITECTURES and (directory / "vocab.json").is_file():
        for file, read in vocabulary_pieces.READERS.items():
            if (directory / file).is_file():
                return read(directory, n_vocab)
    if not (directory / "tokenizer.json").is_file():
        if arch == "t5" and any((directory / name).is_file() for name in SENTENCEPIECE_FILES):
            return sentencepiece_fields(directory, n_vocab)
        others = [name for name in _OTHERS if (directory / name).is_file()]
        if others:
            raise UnsupportedError(
                f"{directory} has {others[0]} but no tokenizer.json. Make one: "
                "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        return _NO_VOCABULARY, [f"{directory} has no tokenizer: the model works by token ids"]
    if arch in vocabulary_seq2seq.ARCHITECTURES:
        return vocabulary_seq2seq.seq2seq_fields(directory, n_vocab)
    tokenizer = Tokenizer(directory)
    state = read_json(directory / "tokenizer.json")
    fields, warnings = _fields(tokenizer, state, directory, arch, n_vocab)
    made = Tokenizer.from_gguf_fields({"general.architecture": arch, **{k: v.value for k, v in fields.items()}})
    around = arch != "whisper"  # whose decoder is started and stopped by rules of its own
    if made.encode(_PROBE, around) != tokenizer.encode(_PROBE, around):
        if arch != "t5" or made.encode(_PROBE.rstrip()) != tokenizer.encode(_PROBE.rstrip()):
            raise UnsupportedError(f"{directory / 'tokenizer.json'}: GGUF cannot express how it splits text")
        warnings.append("spaces at the end of a text are dropped, as SentencePiece does; tokenizer.json keeps one")
    fields |= vocabulary_seq2seq.further_ends(tokenizer.eog_ids - made.eog_ids, n_vocab)
    fields["tokenizer.huggingface.json"] = string(json.dumps(state, ensure_ascii=False, separators=(",", ":")))
    return fields, warnings


def _fields(
    tokenizer: Tokenizer, state: Mapping[str, Any], directory: Path, arch: str, n_vocab: int
) -> tuple[dict[str, GGUFValue], list[str]]:
    vocabulary, warnings = tokenizer.vocabulary, []
    whisper = arch == "whisper"
    tokens, types = _tokens(vocabulary, tokenizer.unk_id, n_vocab, whisper)
    if len(vocabulary.tokens) > n_vocab:
        warnings.append(
            f"{len(vocabulary.tokens) - n_vocab} tokens have no row in the embedding of {n_vocab} and are left out, "
            f"the first is {vocabulary.tokens[n_vocab]!r}"
        )
    where = directory / "tokenizer.json"
    model = state.get("model", {})
    unigram = model.get("type") == "Unigram"
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    if not unigram and (model.get("type", "BPE") != "BPE" or not merges):
        raise UnsupportedError(f"{where}: a {model.get('type')} model without merges; supported: BPE and Unigram")
    if unigram:
        kind = unigram_kind(tokenizer, state, tokens, where)
    elif vocabulary.byte_level:
        pre = _pre_tokenizer(vocabulary, bool(model.get("ignore_merges")), where)
        kind = {"model": string("gpt2"), "pre": string(pre), "merges": array(merges, GGUFValueType.STRING)}
    else:
        _require_sentencepiece(vocabulary, model, where)
        kind = {
            "model": string("llama"),
            "pre": string("default"),
            "scores": array(_scores(directory, tokens, merges), GGUFValueType.FLOAT32),
            "add_space_prefix": boolean(vocabulary.strips_space),
        }
    end = tokenizer.eos_id if whisper else _end(tokenizer, where)
    ids = {"bos": tokenizer.bos_id, "eos": end, "unknown": tokenizer.unk_id, "padding": tokenizer.pad_id}
    fields = kind | {
        "tokens": array(tokens, GGUFValueType.STRING),
        "token_type": array(types, GGUFValueType.INT32),
        "add_bos_token": boolean(tokenizer.add_bos and not whisper),
        "add_eos_token": boolean(tokenizer.add_eos and not whisper),
        **{f"{name}_token_id": uint32(id) for name, id in ids.items() if id is not None and id < n_vocab},
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    if "scores" in kind and not unigram and (scheme := _metaspace(vocabulary)):
        named[gguf.METASPACE] = string(scheme)
    named |= _flags(vocabulary, n_vocab, gguf.strips_unsaid(arch, kind["model"].value))
    if tokenizer.chat_template:
        named["tokenizer.chat_template"] = string(tokenizer.chat_template)
    for name, template in tokenizer.chat_templates.items():
        named[f"tokenizer.chat_template.{name}"] = string(template)
    return named, warnings


def _tokens(vocabulary: Vocabulary, unknown: int | None, n_vocab: int, whisper: bool) -> tuple[list[str], list[int]]:
    """The text and type of each row of the embedding."""
    tokens, types, added = list[str](), list[int](), vocabulary.backend.get_added_tokens_decoder()
    named = (vocabulary.tokens + [None] * n_vocab)[:n_vocab]
    for id, text in enumerate(with_timestamps(named) if whisper else named):
        if text is None:
            kind = TokenType.UNUSED
        elif id == unknown and not vocabulary.byte_level:
            kind = TokenType.UNKNOWN
        elif id in vocabulary.control or whisper and is_special(text):
            kind = TokenType.CONTROL
        elif id in added:
            kind = TokenType.USER_DEFINED
            text = text if vocabulary.byte_level else text.replace(SPACE, " ")  # found in a text as it is
        else:
            kind = TokenType.BYTE if not vocabulary.byte_level and _is_byte(text) else TokenType.NORMAL
        tokens.append(f"[PAD{id}]" if text is None else text)
        types.append(kind)
    return tokens, types


def _flags(vocabulary: Vocabulary, n_vocab: int, strips_unsaid: bool) -> dict[str, GGUFValue]:
    """How tokenizer.json finds added tokens in a text, where that is not usual, or not what readers take for usual."""
    added = [(id, one) for id, one in vocabulary.backend.get_added_tokens_decoder().items() if id < n_vocab]
    bits = [sum(getattr(one, flag) << at for at, flag in enumerate(gguf.FLAGS)) for _, one in added]
    if not any(bits) and not (strips_unsaid and added):
        return {}
    of_each = {gguf.ADDED: [id for id, _ in added], gguf.ADDED_FLAGS: bits}
    return {key: array(values, GGUFValueType.INT32) for key, values in of_each.items()}


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer component, sequences unrolled."""
    state = component if isinstance(component, dict) or component is None else json.loads(component.__getstate__())
    if state is None:
        return
    if state.get("type") == "Sequence":
        for inner in state.get("pretokenizers") or state.get("normalizers") or ():
            yield from _parts(inner)
    else:
        yield {key: value for key, value in state.items() if key != "trim_offsets"}  # which moves no cut


def _pre_tokenizer(vocabulary: Vocabulary, ignore_merges: bool, where: Path) -> str:
    """The name in `slimrt.tokenizer.pretokenizers` of what cuts this vocabulary's text into words."""
    backend = vocabulary.backend
    wanted = list(_parts(backend.pre_tokenizer)), list(_parts(backend.normalizer)), ignore_merges
    for name in dict.fromkeys(_PREFERRED + pretokenizers.SUPPORTED):
        known = pretokenizers.lookup(name)
        if (list(_parts(known.splitter)), list(_parts(known.normalizer)), known.ignore_merges) == wanted:
            return name
    raise UnsupportedError(
        f"{where}: its pre-tokenizer is none that GGUF has a name for in slimrt "
        f"({', '.join(pretokenizers.SUPPORTED)}): {json.dumps(wanted[0])[:300]}"
    )


def _end(tokenizer: Tokenizer, where: Path) -> int | None:
    """The id that is EOS in GGUF: what is added to texts, which is another end than EOS in Qwen3-Embedding, if that
    changes nothing else. UnsupportedError: GGUF cannot say what is added to a text."""
    vocabulary, end = tokenizer.vocabulary, tokenizer.eos_id
    templates = [tokenizer.chat_template or "", *tokenizer.chat_templates.values()]
    if not any("eos_token" in one for one in templates) and tokenizer.eog_ids.issuperset(vocabulary.suffix):
        end = vocabulary.suffix[0] if len(vocabulary.suffix) == 1 else end
    ends = {"bos": (vocabulary.prefix, tokenizer.bos_id), "eos": (vocabulary.suffix, end)}
    for name, (around, id) in ends.items():
        if around not in ((), (id,)):
            raise UnsupportedError(
                f"{where}: adds the ids {list(around)} to a text; GGUF can only say whether {name.upper()} is added"
            )
    return end


def _require_sentencepiece(vocabulary: Vocabulary, model: Mapping[str, Any], where: Path) -> None:
    backend = vocabulary.backend
    steps = {_step(part) for component in (backend.normalizer, backend.pre_tokenizer) for part in _parts(component)}
    if not model.get("byte_fallback") or not steps <= {"Prepend", "Replace", "Metaspace", "Split at spaces"}:
        raise UnsupportedError(f"{where}: neither byte-level BPE nor SentencePiece's with byte fallback")


def _metaspace(vocabulary: Vocabulary) -> str | None:
    """The rule by which a Metaspace puts spaces in front of a text, if there is one."""
    parts = _parts(vocabulary.backend.pre_tokenizer)
    return next((part["prepend_scheme"] for part in parts if part["type"] == "Metaspace"), None)


def _step(part: Mapping[str, Any]) -> str:
    """What a part does, by name. Gemma's cuts at spaces, of which its normalizer has left none."""
    return "Split at spaces" if part.get("pattern") == {"String": " "} and part["type"] == "Split" else part["type"]


def _scores(directory: Path, tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece's scores: its own when its file is there, else the order of the merges says the same. It does, too,
    where the file is of fewer tokens: one that was left as it was when tokenizer.json got more."""
    model = directory / "tokenizer.model"
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), place)
    own = read_scores(model) if model.is_file() else {}
    if rank.keys() <= own.keys():
        return [own.get(token, 0.0) for token in tokens]
    return [-float(rank.get(token, len(merges))) for token in tokens]
