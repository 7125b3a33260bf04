# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tokenizers as GGUF vocabularies, and the texts that a conversion measures a model on."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import slimrt
from conftest import third_party
from reference_files import hf_tensors
from slimrt.converter.convert import convert
from slimrt.errors import UnsupportedError
from slimrt.folding.calibrate import DEFAULT_TEXT
from slimrt.modelfile.gguf import ModelData, read_gguf, string, write_gguf
from slimrt.modelfile.hf.directory import read_hf
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.tokenizer import pretokenizers
from test_convert_directories import changed_config, save_tensors
from vocabularies import vectors

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

TEXT = DEFAULT_TEXT.read_text()


def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A small byte-level BPE that cuts text as the named pre-tokenizer does."""
    known = pretokenizers.lookup(pre)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=known.ignore_merges))
    made.pre_tokenizer, made.decoder = known.splitter, tokenizers.decoders.ByteLevel()
    if known.normalizer:
        made.normalizer = known.normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT],
        tokenizers.trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
        ),
    )
    return made


def sentencepiece_like(*more: str) -> tokenizers.Tokenizer:
    """What transformers makes of a Llama tokenizer.model: BPE over whole text, with byte fallback and a BOS."""
    letters = sorted(set(TEXT.replace(" ", "\u2581")) | {"\u2581"})
    words = ["th", "the", "\u2581the", "\u2581t", "in", "an", "and", "\u2581a", "er", "\u2581w", "on", "ing", *more]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    merges = [(w[:cut], w[cut:]) for w in words for cut in range(1, len(w)) if {w[:cut], w[cut:]} <= set(tokens)]
    model = tokenizers.models.BPE(
        {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    made, parts = tokenizers.Tokenizer(model), tokenizers.decoders
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def with_tokenizer(tmp_path: Path, made: tokenizers.Tokenizer, n_vocab: int, **settings) -> Path:
    """llama_mha with that tokenizer, its embedding grown to n_vocab rows."""
    directory = changed_config(tmp_path, "llama_mha", vocab_size=n_vocab)
    tensors = hf_tensors(directory)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(0).normal(size=(n_vocab, 48)) * 0.2
    save_tensors(directory, tensors)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings}))
    return directory


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "mpt", "tekken", "gpt-4o", "dbrx"])
def test_byte_level_tokenizer_is_recognised(pre, tmp_path):
    templates = [{"name": "default", "template": "{{ bos_token }}"}, {"name": "rag", "template": "{{ documents }}"}]
    directory = with_tokenizer(tmp_path, byte_level(pre), 330, chat_template=templates)
    report = convert(directory, tmp_path / "out.gguf")
    model = read_gguf(tmp_path / "out.gguf")
    made, own = slimrt.Tokenizer(tmp_path / "out.gguf"), slimrt.Tokenizer(directory)
    assert (model.value("tokenizer.ggml.model"), model.value("tokenizer.ggml.pre")) == ("gpt2", pre)
    assert made.encode(TEXT) == own.encode(TEXT) and made.decode(made.encode(TEXT)) == TEXT
    assert (made.bos_id, made.eos_id, made.add_bos, made.chat_template) == (0, 1, False, "{{ bos_token }}")
    assert made.chat_templates == {"rag": "{{ documents }}"}
    assert model.value("tokenizer.ggml.tokens")[-1] == b"[PAD329]" and report.warnings == []
    assert json.loads(model.value("tokenizer.huggingface.json")) == json.loads(
        (directory / "tokenizer.json").read_text()
    )


def test_gpt_neox_tokenizer(tmp_path):
    """Pythia's and GPT-NeoX-20B's, with tokens of many spaces; by each name that GGUFs give its splitting."""
    (tmp_path / "tokenizer.json").symlink_to(third_party("tokenizers/20B_tokenizer_neox.json"))
    fields, warnings = vocabulary_fields(tmp_path, "gptneox", 50432)
    values = {key: field.value for key, field in fields.items()}
    assert warnings == [] and values["tokenizer.ggml.tokens"][50431] == "[PAD50431]"
    for pre in (values["tokenizer.ggml.pre"], "olmo"):
        made = slimrt.Tokenizer.from_gguf_fields({**values, "tokenizer.ggml.pre": pre})
        for text, ids in vectors("mpt"):
            assert made.encode(text) == ids, repr(text)
        assert made.encode("def f(x):\n        return x\n")[5:7] == [187, 50270]


def test_sentencepiece_tokenizer(tmp_path):
    made = sentencepiece_like()
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size())
    convert(directory, tmp_path / "out.gguf")
    got, own = slimrt.Tokenizer(tmp_path / "out.gguf"), slimrt.Tokenizer(directory)
    assert got.add_bos and got.encode(TEXT) == own.encode(TEXT)
    assert len(got.encode(TEXT)) < 0.95 * len(TEXT)  # the merges are used
    assert got.encode("\u4f60 hi") == own.encode("\u4f60 hi")  # bytes where no token is


def test_a_sentencepiece_file_of_fewer_tokens_than_tokenizer_json(tmp_path):
    """One that was left behind when tokenizer.json got more: its scores rank what it has, and not what it lacks."""
    made = sentencepiece_like("nt")
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size())
    with (directory / "tokenizer.model").open("wb") as file:
        for token, id in sorted(made.get_vocab().items(), key=lambda one: one[1]):
            text = token.encode()
            if token != "nt":
                file.write(bytes([10, len(text) + 7, 10, len(text)]) + text + struct.pack("<Bf", 0x15, -id))
    convert(directory, tmp_path / "out.gguf")
    got, own = slimrt.Tokenizer(tmp_path / "out.gguf"), slimrt.Tokenizer(directory)
    assert got.encode("want to hunt") == own.encode("want to hunt")


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_metaspace_tokenizer(scheme, tmp_path):
    """Mistral's later ones: no space in front of what has one or, with "first", of what follows a control token."""
    made = sentencepiece_like()
    made.normalizer = None
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size())
    convert(directory, tmp_path / "out.gguf")
    got = slimrt.Tokenizer(tmp_path / "out.gguf")
    for text in ("the", " the", "</s>the", "</s> the</s>the ", "", " "):
        assert got.encode(text) == made.encode(text).ids, repr(text)
    marked = "a</s>the"
    assert got.encode_plain(marked, lambda part: part) == made.encode(marked, add_special_tokens=False).ids


def test_gemma_tokenizer(tmp_path):
    """Cut at spaces that the normalizer has replaced; runs of them are added tokens that are not special."""
    made, parts = sentencepiece_like(), tokenizers.decoders
    state = json.loads(made.to_str())
    runs = ["\u2581" * n for n in (2, 3, 4)]
    state["model"]["vocab"] |= {run: len(state["model"]["vocab"]) + at for at, run in enumerate(runs)}
    cuts = [[run[:at], run[at:]] for run in runs for at in range(1, len(run))]
    state["model"]["merges"] = cuts + state["model"]["merges"]
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.add_tokens([tokenizers.AddedToken(run, normalized=False) for run in runs])
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = parts.Sequence([parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse()])
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size())
    fields, warnings = vocabulary_fields(directory, "gemma", made.get_vocab_size())
    values = {key: field.value for key, field in fields.items()}
    assert warnings == [] and values["tokenizer.ggml.tokens"][-3:] == ["  ", "   ", "    "]
    text = "then\n    and  the\n   in"
    ids = made.encode(text).ids
    for tokenizer in (slimrt.Tokenizer(directory), slimrt.Tokenizer.from_gguf_fields(values)):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == made.decode(ids) == text


def test_all_ids_that_end_a_text(tmp_path):
    """GGUF has two beside EOS; of those without a row none is written."""
    made = byte_level("gpt-2")
    made.add_special_tokens([f"<|{name}|>" for name in ("a", "b", "c", "d", "im_end")])
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size() - 1)
    first = made.token_to_id("<|a|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(first, first + 4)]}))
    convert(directory, tmp_path / "out.gguf")
    assert slimrt.Tokenizer(tmp_path / "out.gguf").eog_ids == {1, *range(first, first + 4)}
    convert(tmp_path / "out.gguf", tmp_path / "again.gguf", outtype="f16")
    assert slimrt.Tokenizer(tmp_path / "again.gguf").eog_ids == {1, *range(first, first + 4)}


def test_another_end_than_eos_behind_each_text(tmp_path):
    """As Qwen3-Embedding's, whose vectors are those of this token."""
    made = byte_level("qwen2")
    made.add_special_tokens(["<|vector|>", "<|im_end|>"])
    end, eos = map(made.token_to_id, ("<|vector|>", "<|im_end|>"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "$A <|vector|>", special_tokens=[("<|vector|>", end)]
    )
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size(), **settings)
    with pytest.raises(UnsupportedError, match=rf"adds the ids \[{end}\]"):  # which ends nothing here
        read_hf(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, end]}))
    convert(directory, tmp_path / "out.gguf")
    got = slimrt.Tokenizer(tmp_path / "out.gguf")
    assert got.encode("the end") == made.encode("the end").ids and got.eog_ids == {eos, end}
    settings["chat_template"] += "{{ eos_token }}"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=rf"adds the ids \[{end}\]"):
        read_hf(directory)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("make", [lambda: byte_level("qwen2"), sentencepiece_like], ids=["bytes", "sentencepiece"])
def test_how_added_tokens_are_found(make, flag, tmp_path):
    """What is around them belongs to them, or they are no part of a word, or they are looked for in normalised text."""
    made = make()
    marks = [tokenizers.AddedToken(text, **{"normalized": False, flag: True}) for text in ("<|a|>", "caf\u00e9>", "  ")]
    made.add_special_tokens(marks[:1])
    made.add_tokens(marks[1:])
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size())
    convert(directory, tmp_path / "out.gguf")
    got = slimrt.Tokenizer(tmp_path / "out.gguf")
    for text in (
        "in \n<|a|>\n the<|a|>the <|a|>",
        "  the   the",
        "cafe\u0301> caf\u00e9>  xcaf\u00e9>x <|a|>",
        "<|a|>",
    ):
        assert got.encode(text) == made.encode(text).ids, repr(text)


@pytest.mark.parametrize("arch", ["phi3", "phimoe", "llama"])
@pytest.mark.parametrize("rstrip", [True, False])
def test_phi_3_strips_after_special_tokens_where_files_do_not_say_it(arch, rstrip, tmp_path):
    made = sentencepiece_like()
    mark = [tokenizers.AddedToken(text, normalized=False, rstrip=rstrip) for text in ("<|user|>", "<|end|>")]
    made.add_special_tokens([*mark, "<|endoftext|>"])
    text = "<|user|>\nthe<|end|>\n the<|endoftext|>\n"
    fields, _ = vocabulary_fields(with_tokenizer(tmp_path, made, made.get_vocab_size()), arch, made.get_vocab_size())
    write_gguf(
        tmp_path / "v.gguf", ModelData({"general.architecture": string(arch), **fields}, {}), show_progress=False
    )
    assert slimrt.Tokenizer(tmp_path / "v.gguf").encode(text) == made.encode(text).ids
    values = {key: value.value for key, value in fields.items() if "slimrt" not in key}
    plain = slimrt.Tokenizer.from_gguf_fields({"general.architecture": arch, **values})
    assert (plain.encode(text) == made.encode(text).ids) == (rstrip == (arch != "llama"))


def test_unknown_pre_tokenizer_is_not_guessed(tmp_path):
    made = byte_level("gpt-2")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[aeiou]+"), "isolated")
    plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, plain])
    with pytest.raises(UnsupportedError, match=r"tokenizer.json: its pre-tokenizer is none.*aeiou"):
        convert(with_tokenizer(tmp_path, made, 330), tmp_path / "out.gguf")


def test_tokenizers_that_gguf_cannot_express(tmp_path):
    made = byte_level("gpt-2")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    directory = with_tokenizer(tmp_path, made, 330)
    with pytest.raises(UnsupportedError, match=r"adds the ids \[0, 1\]"):
        read_hf(directory)
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(UnsupportedError, match="tokenizer.model but no tokenizer.json.*save_pretrained"):
        read_hf(directory)


def test_tokens_without_a_row_are_left_out(tmp_path):
    made = byte_level("gpt-2")
    made.add_special_tokens(["<pad>"])
    directory = with_tokenizer(tmp_path, made, made.get_vocab_size() - 1)
    model, warnings = read_hf(directory)
    assert len(model.value("tokenizer.ggml.tokens")) == 320
    assert "1 tokens have no row in the embedding of 320" in warnings[0] and "<pad>" in warnings[0]


def test_calibration_text(tmp_path):
    source = with_tokenizer(tmp_path, byte_level("gpt-2"), 330)
    other = tmp_path / "other.txt"
    other.write_text("It was a bright cold day. " * 40)
    basis = {}
    for name, text in {"built-in": None, "file": other, "none": "none"}.items():
        report = convert(source, tmp_path / "out.gguf", cache="k", calibration=text)
        basis[name] = report.calibration
        assert 1e-4 < report.layers[0].errors["f16"] < 5e-3
    assert basis["built-in"] == "4808 tokens of the built-in text" and basis["file"].endswith("of other.txt")
    assert basis["none"] == "no text: white activations assumed"
    with pytest.raises(FileNotFoundError, match="missing.txt: no such text file"):
        convert(source, tmp_path / "out.gguf", cache="k", calibration=tmp_path / "missing.txt")
    report = convert(source, tmp_path / "out.gguf", cache="k", outtype="q8_0", verify=other)
    assert report.verify.tokens == 65 and 0 < report.verify.kl < 0.1  # 128 positions, half of them prefilled
    assert "same top token" in report.table()
