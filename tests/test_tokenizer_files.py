# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in GGUF files and Hugging Face directories: what is read, and what bad ones say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

import slimrt
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.tokenizer.gguf import read_file
from slimrt.tokenizer.tokenizer import Tokenizer
from vocabularies import NORMAL, SMALL, byte_level_fields, ggml, sentencepiece_fields

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


class TestBadFields:
    @pytest.mark.parametrize(
        ("changes", "message"),
        {
            "tokens": ({"tokens": []}, "tokens"),
            "tokens kind": ({"tokens": np.ones(3)}, "tokens"),
            "types count": ({"token_type": np.ones(3, np.int32)}, "token_type"),
            "scores count": ({"scores": np.ones(3, np.float32)}, "scores"),
            "scores nan": ({"scores": np.full(276, np.nan, np.float32)}, "scores"),
            "bos range": ({"bos_token_id": 99999}, "bos_token_id"),
            "bos kind": ({"bos_token_id": "one"}, "bos_token_id"),
            "bos wanted, none": ({"bos_token_id": 0xFFFFFFFF, "add_bos_token": True, "tokens": ["a"] * 276}, "bos"),
            "add_bos kind": ({"add_bos_token": 3.5}, "add_bos_token"),
        }.values(),
    )
    def test_sentencepiece(self, changes, message):
        with pytest.raises(ModelFormatError, match=message):
            Tokenizer.from_gguf_fields(sentencepiece_fields(**changes))

    @pytest.mark.parametrize(
        ("merges", "message"),
        [
            (["he"], "'he' has no space"),
            (["h zz"], "`zz` out of vocabulary"),
            (["x y"], "`xy` out of vocabulary"),
            (None, "merges is missing"),
            ([1, 2], "merges is .*not a list of strings"),
        ],
    )
    def test_merges(self, merges, message):
        with pytest.raises(ModelFormatError, match=message):
            Tokenizer.from_gguf_fields(byte_level_fields(merges=merges))

    def test_unigram_without_unknown_token(self):
        fields = ggml(model="t5", tokens=["a"], scores=np.zeros(1, np.float32))
        with pytest.raises(ModelFormatError, match="unknown"):
            Tokenizer.from_gguf_fields(fields)

    @pytest.mark.parametrize("model", ["bert", "rwkv", None])
    def test_unknown_model(self, model):
        with pytest.raises(UnsupportedError, match="supported: llama, gpt2, t5"):
            Tokenizer.from_gguf_fields(byte_level_fields(model=model))

    def test_a_text_that_occurs_twice_is_its_first_token(self):
        tokens = [*byte_level_fields()["tokenizer.ggml.tokens"], "hello"]
        types = [*byte_level_fields()["tokenizer.ggml.token_type"], NORMAL]
        tokenizer = Tokenizer.from_gguf_fields(byte_level_fields(tokens=tokens, token_type=types))
        assert tokenizer.encode("hello") == [tokens.index("hello")]
        assert tokenizer.decode([len(tokens) - 1]) == "hello"


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> Path:
    """The small SentencePiece vocabulary in a file, among fields of other kinds."""
    path = tmp_path_factory.mktemp("gguf") / "vocabulary.gguf"
    fields = sentencepiece_fields()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("general.tags", ["a", "bc"])
    writer.add_array("general.numbers", [1, 2, 3])
    writer.add_float64("general.real", 0.5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_scores(fields["tokenizer.ggml.scores"].tolist())
    writer.add_token_types(fields["tokenizer.ggml.token_type"].tolist())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class TestFiles:
    def test_written_and_read(self, small_gguf):
        tokenizer = Tokenizer(str(small_gguf))
        assert tokenizer.chat_template == "{{ messages }}"
        assert tokenizer.encode("ab cd é") == SMALL["sentencepiece"].encode("ab cd é")
        fields = read_file(small_gguf)
        assert fields["general.architecture"] == "llama" and "general.tags" not in fields

    def test_tensors_of_a_type_that_does_not_run_are_no_matter(self, small_gguf, tmp_path):
        data = bytearray(small_gguf.read_bytes())
        data[8] = 1  # one tensor: iq1_s, and its data is not even there
        data += struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 256, 19, 0)
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        with pytest.raises(UnsupportedError, match="IQ1_S"):
            slimrt.Model(path)
        assert Tokenizer(path).encode("ab cd") == Tokenizer(small_gguf).encode("ab cd")

    def test_every_truncation_is_a_typed_error(self, small_gguf, tmp_path):
        data = small_gguf.read_bytes()
        path = tmp_path / "cut.gguf"
        for size in [*range(0, 300), *range(300, len(data) - 1, 97)]:
            path.write_bytes(data[:size])
            words = "the file is truncated or damaged" if size >= 4 else "not a GGUF file, a tokenizer.json or"
            with pytest.raises(ModelFormatError, match=words):
                Tokenizer(path)

    @settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(changes=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255)), min_size=1, max_size=5))
    def test_corruption_is_a_typed_error_or_harmless(self, small_gguf, tmp_path, changes):
        data = bytearray(small_gguf.read_bytes())
        for at, byte in changes:
            data[at % len(data) if at % 2 else at % 400] = byte
        path = tmp_path / "corrupted.gguf"
        path.write_bytes(data)
        try:
            tokenizer = Tokenizer(path)
        except (ModelFormatError, UnsupportedError):
            return
        tokenizer.decode(tokenizer.encode("ab cd 😀"))

    @pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**9])
    def test_absurd_counts_end_at_once(self, tmp_path, count):
        def field(key, kind, value):
            return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value

        def header(fields):
            return b"GGUF" + struct.pack("<IQQ", 3, 0, fields)

        strings = field(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, count))
        numbers = field(b"tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, count))
        text = field(b"tokenizer.ggml.model", 8, struct.pack("<Q", count))
        for data in (header(count), header(1) + strings, header(1) + numbers, header(1) + text):
            path = tmp_path / "absurd.gguf"
            path.write_bytes(data + b"\0" * 64)
            with pytest.raises(ModelFormatError, match="the file is truncated or damaged"):
                Tokenizer(path)

    def test_other_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="absent.gguf"):
            Tokenizer(tmp_path / "absent.gguf")
        contents = {"a.gguf": b"\x89PNG", "b.bin": b"", "c.json": b"{]", "d.json": b"{}", "e.gguf": b"FUGG"}
        for name, data in contents.items():
            (tmp_path / name).write_bytes(data)
            with pytest.raises(ModelFormatError, match=name):
                Tokenizer(tmp_path / name)

    @pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
    def test_versions(self, tmp_path, version):
        (tmp_path / "v.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(ModelFormatError, match="version"):
            Tokenizer(tmp_path / "v.gguf")


@pytest.fixture
def directory(tmp_path) -> Path:
    """A Hugging Face directory: byte-level BPE with a BOS, and settings that would truncate."""
    backend = tokenizers.Tokenizer(
        models.BPE({text: id for id, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"})
    return tmp_path


def write(directory: Path, name: str, value: dict) -> None:
    (directory / name).write_text(json.dumps(value))


class TestDirectory:
    def test_opens(self, directory):
        tokenizer = Tokenizer(directory)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos) == (256, 257, True, False)
        assert tokenizer.eog_ids == {257, 258}
        assert tokenizer.vocab_size == 259
        assert tokenizer.chat_template is None
        ids = tokenizer.encode("longer than four")
        assert len(ids) == 17 and ids.count(256) == 1  # neither truncated nor padded
        assert tokenizer.encode("<bos>longer than four") == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == "longer than four"
        assert Tokenizer(directory / "tokenizer.json").eos_id == 257

    def test_bare_tokenizer_json(self, directory):
        (directory / "tokenizer.json").rename(directory / "other.json")
        tokenizer = Tokenizer(directory / "other.json")
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (256, None, True)

    def test_configuration_overrules_the_post_processor(self, directory):
        config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False, "add_eos_token": True}
        write(directory, "tokenizer_config.json", config)
        assert Tokenizer(directory).encode("") == [257]

    def test_ids_from_the_generation_settings(self, directory):
        write(directory, "tokenizer_config.json", {})
        write(directory, "config.json", {"bos_token_id": 256, "eos_token_id": 5})
        write(directory, "generation_config.json", {"eos_token_id": [257, 7, 10**6, None]})
        tokenizer = Tokenizer(directory)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
        assert tokenizer.eog_ids == {257, 7, 258}

    @pytest.mark.parametrize("added", [None, False, True])
    @pytest.mark.parametrize(
        "config",
        [
            {"added_tokens_decoder": {"256": {"content": "<x>", "special": True, "rstrip": True}}},
            {"added_tokens_decoder": {"256": {"content": "<x>", "special": False}}},
            {"added_tokens_decoder": {"256": {"content": "<x>", "special": False}}, "eos_token": "<x>"},
            {"eos_token": {"__type": "AddedToken", "content": "<x>", "lstrip": False, "rstrip": True}},
            {"additional_special_tokens": ["<x>"]},
            {"extra_special_tokens": {"x_token": "<x>"}},
        ],
        ids=["special", "plain", "plain, eos", "eos", "additional", "extra"],
    )
    def test_tokens_that_the_configuration_declares(self, tmp_path, added, config):
        """With a token of the vocabulary that tokenizer.json calls nothing, added, or special."""
        transformers = pytest.importorskip("transformers")
        vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(["<x>"] if added is None else [])]
        backend = tokenizers.Tokenizer(models.BPE({text: id for id, text in enumerate(vocabulary)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if added is not None:
            backend.add_tokens([tokenizers.AddedToken("<x>", special=added, normalized=False)])
        backend.save(str(tmp_path / "tokenizer.json"))
        write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
        oracle, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
        wanted = oracle.encode("a<x> b", add_special_tokens=False)
        assert tokenizer.encode("a<x> b") == wanted and 256 in wanted
        special = oracle.decode(wanted, skip_special_tokens=True) == oracle.decode(wanted).replace("<x>", "")
        assert ("<x>" in tokenizer.special_tokens) == (special or "additional_special_tokens" in config)

    def test_tokens_that_the_configuration_alone_has(self, directory):
        declared = {"259": {"content": "<a>", "special": True}, "260": {"content": "<b>", "special": False}}
        write(directory, "tokenizer_config.json", {"added_tokens_decoder": declared, "pad_token": "<none>"})
        tokenizer = Tokenizer(directory)
        assert tokenizer.encode("<a><b>", add_special_tokens=False) == [259, 260] and tokenizer.vocab_size == 261
        assert tokenizer.special_tokens["<a>"] == 259 and tokenizer.pad_id is None
        for wrong, words in (
            ({"300": {"content": "<a>"}}, "'<a>' has id 300, and there are 259 tokens"),
            ({"259": {}}, "content"),
            ([1], "list"),
        ):
            write(directory, "tokenizer_config.json", {"added_tokens_decoder": wrong})
            with pytest.raises(ModelFormatError, match=f"tokenizer_config.json.*{words}"):
                Tokenizer(directory)

    def test_null_is_no_name(self, directory):
        write(directory, "special_tokens_map.json", {"eos_token": {"content": "<eos>"}})
        write(directory, "tokenizer_config.json", {"eos_token": None})
        assert Tokenizer(directory).eos_id == 257

    def test_chat_template_places(self, directory):
        write(directory, "tokenizer_config.json", {"chat_template": "one"})
        assert Tokenizer(directory).chat_template == "one"
        named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
        write(directory, "tokenizer_config.json", {"chat_template": named})
        assert Tokenizer(directory).chat_template == "three"
        (directory / "chat_template.jinja").write_text("\ufefffour")  # as some editors begin a file
        assert Tokenizer(directory).chat_template == "four"
        (directory / "chat_template.jinja").write_bytes(b"\xe4")
        with pytest.raises(ModelFormatError, match="chat_template.jinja: not UTF-8"):
            Tokenizer(directory)

    def test_broken_neighbours(self, directory):
        for text in ("[1]", "{", '"x"'):
            (directory / "generation_config.json").write_text(text)
            with pytest.raises(ModelFormatError, match="generation_config"):
                Tokenizer(directory)

    def test_missing_tokenizer_json_says_how_to_make_one(self, tmp_path):
        with pytest.raises(UnsupportedError, match="save_pretrained"):
            Tokenizer(tmp_path)

    def test_unknown_decoder(self, directory):
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        backend.decoder = decoders.WordPiece()
        backend.save(str(directory / "tokenizer.json"))
        with pytest.raises(UnsupportedError, match="WordPiece.*supported: ByteLevel"):
            Tokenizer(directory)

    def test_sentencepiece_decoder(self, tmp_path):
        """A llama-style tokenizer.json gives the ids and the text of the same vocabulary in a GGUF."""
        small = SMALL["sentencepiece"]
        backend = tokenizers.Tokenizer.from_str(small.vocabulary.backend.to_str())
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer(tmp_path)
        for text in ("ab c  é 😀", " ab", ""):
            ids = small.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == text == backend.decode(ids)
