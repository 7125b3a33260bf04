# SPDX-License-Identifier: Apache-2.0
"""whisper.cpp's own files: read into the same GGUF as Hugging Face's directory, and what damaged ones say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.numpy import save_file

import slimrt
import whisper_bin
from conftest import relative, third_party
from seq2seq_models import GOLDEN
from slimrt.cli import main
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.ggml_bin import read_ggml_bin
from slimrt.modelfile.gguf import ModelData, read_gguf
from slimrt.modelfile.hf.directory import read_hf
from slimrt.modelfile.hf.vocabulary_whisper import LANGUAGES, merges_of_ranks, special_tokens
from slimrt.tokenizer.vocabulary import byte_level_alphabet, from_byte_level

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

BYTES = [from_byte_level(letter) for letter in byte_level_alphabet()]
TOKENS = [*BYTES, b" t", b"he", b" the", b"\xc3\xa9"]
N_LANGUAGES = 3
N_VOCAB = len(TOKENS) + N_LANGUAGES + whisper_bin.N_SPECIAL

FILE_TYPES = {Kind.F32: 0, Kind.F16: 1, Kind.Q4_0: 2, Kind.Q4_1: 3, Kind.Q8_0: 7, Kind.Q5_0: 8, Kind.Q5_1: 9}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return whisper_bin.tensors(N_VOCAB)


@pytest.fixture(scope="module")
def from_hf(weights, tmp_path_factory) -> ModelData:
    """The same weights out of a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("hf")
    config = json.loads((GOLDEN / "whisper" / "config.json").read_text())
    config |= {"vocab_size": N_VOCAB, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return read_hf(directory)[0]


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory) -> bytes:
    return whisper_bin.write_bin(tmp_path_factory.mktemp("bin") / "ggml.bin", TOKENS, weights, Kind.F16).read_bytes()


# ---------------------------------------------------------------- good ones
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0],
                         ids=lambda kind: kind.name)  # fmt: skip
def test_the_same_model_as_from_hugging_face(kind, weights, from_hf, tmp_path):
    source = whisper_bin.write_bin(tmp_path / "ggml-tiny.bin", TOKENS, weights, kind)
    report = slimrt.convert(source, tmp_path / "out.gguf", progress=False)
    assert report.warnings == []
    model = read_gguf(report.path)
    assert model.tensors.keys() == from_hf.tensors.keys()
    for name, tensor in model.tensors.items():
        plain, wanted = tensor.type.name == "F32", from_hf.tensor(name).values()
        assert tensor.shape == wanted.shape and (plain or tensor.type == kind), name
        convolution = "conv" in name and name.endswith("weight")
        if plain and not convolution:
            assert np.array_equal(tensor.values(), wanted)
        elif plain:  # stored in half precision, if not in full
            assert np.array_equal(tensor.values(), wanted if kind == Kind.F32 else wanted.astype(np.float16))
        else:  # block for block as in the source
            assert np.array_equal(
                tensor.load(), quants.quantize(wanted, kind).view(np.uint8).reshape(tensor.byte_shape)
            )
    keys = [key for key in from_hf.metadata if key.startswith("whisper.") and "start_token" not in key]
    assert {key: model.value(key) for key in keys} == {key: pytest.approx(from_hf.value(key)) for key in keys}
    assert model.value("whisper.decoder_start_token_id") == len(TOKENS) + 1
    assert model.value("general.file_type") == FILE_TYPES[kind]


def test_outtype(weights, tmp_path):
    source = whisper_bin.write_bin(tmp_path / "ggml.bin", TOKENS, weights, Kind.F16)
    made = read_gguf(slimrt.convert(source, tmp_path / "out.gguf", outtype="q8_0", progress=False).path)
    assert {made.tensor(f"{name}.weight").type.name for name in ("token_embd", "enc.blk.1.ffn_up")} == {"Q8_0"}
    assert relative(made.tensor("token_embd.weight").values(), weights["model.decoder.embed_tokens.weight"]) < 0.01


def test_a_model_opens_it_as_it_is(weights, tmp_path, monkeypatch, capsys):
    """By way of the cache folder, once; the same words as from a file that was converted by hand."""
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "cache"))
    source = whisper_bin.write_bin(tmp_path / "ggml-tiny.bin", TOKENS, weights, Kind.Q8_0)
    source.symlink_to(source.rename(tmp_path / "0123abcd"))  # as Hugging Face's cache has it
    converted = slimrt.convert(source, tmp_path / "out.gguf", progress=False).path
    sound = np.sin(np.arange(24000) * 0.3).astype(np.float32)
    heard = []
    for path in (source, converted):
        with slimrt.Model(path) as model:
            segments, info = model.transcribe(sound, temperature=0.0, no_speech_threshold=None)
        assert info.language in ("en", "zh", "de")
        heard.append([(one.start, one.tokens) for one in segments])
    assert heard[0] == heard[1] != []
    kept = list((tmp_path / "cache").glob("*.gguf"))
    assert len(kept) == 1 and kept[0].name.startswith("ggml-tiny.bin-")
    assert main(["inspect", str(source), "--json"]) == 0
    metadata = json.loads(capsys.readouterr().out)["metadata"]
    assert metadata["whisper.mel_bins"] == whisper_bin.N_MELS and metadata["general.name"] == "ggml-tiny"
    assert list((tmp_path / "cache").glob("*.gguf")) == kept
    source.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(ModelFormatError, match="ggml-tiny.bin: cut off"):
        slimrt.Model(source)


def test_tokens(weights, tmp_path):
    source = whisper_bin.write_bin(tmp_path / "ggml.bin", [*TOKENS, b"<|endoftext|>"], weights, Kind.F16)
    slimrt.convert(source, tmp_path / "out.gguf", progress=False)
    tokenizer = slimrt.Tokenizer(tmp_path / "out.gguf")
    names = tokenizer.special_tokens
    assert tokenizer.eos_id == names["<|endoftext|>"] == len(TOKENS) and not tokenizer.add_eos
    assert names["<|zh|>"] == len(TOKENS) + 3 and names["<|30.00|>"] == N_VOCAB - 1
    ids = tokenizer.encode("<|startoftranscript|><|en|><|0.02|> the \u00e9<|endoftext|>")
    start, first = len(TOKENS) + 1, N_VOCAB - 1501
    assert ids == [start, start + 1, first + 1, 258, 220, 259, len(TOKENS)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " the \u00e9"


def test_an_early_file_is_restored_as_far_as_it_goes(tmp_path):
    """The first converter replaced what is not UTF-8; the fixture's header and 50257 tokens, with weights behind."""
    early = third_party("whisper/for-tests-ggml-tiny.en.bin").read_bytes()
    n_vocab = struct.unpack_from("<i", early, 4)[0]
    made = whisper_bin.tensors(n_vocab)
    body = b"".join(whisper_bin.tensor(name, values, Kind.F16) for name, values in made.items())
    source = tmp_path / "ggml-tiny.en.bin"
    source.write_bytes(whisper_bin.header(n_vocab) + early[48:] + body)
    report = slimrt.convert(source, tmp_path / "out.gguf", progress=False)
    assert len(report.warnings) == 1 and "end inside a character" in report.warnings[0]
    tokenizer, gpt2 = (
        slimrt.Tokenizer(path) for path in (report.path, third_party("tokenizers/ggml-vocab-gpt-2.gguf"))
    )
    for text in ("Ask not what your country can do for you.", "  12 o'clock\n", "na\u00efve caf\u00e9"):
        assert tokenizer.encode(text) == gpt2.encode(text)
    assert tokenizer.special_tokens["<|startoftranscript|>"] == 50257 and tokenizer.special_tokens["<|0.00|>"] == 50363


def test_special_tokens_are_hugging_face_s():
    state = json.loads(third_party("tokenizers/whisper_tokenizer.json").read_text())
    assert special_tokens(50257, 51865) == [token["content"] for token in state["added_tokens"]]
    assert len(LANGUAGES) == 100 and special_tokens(50257, 51866)[101:102] == ["<|yue|>"]
    assert "<|nospeech|>" in special_tokens(50257, 51866)


def test_merges_follow_from_ranks():
    """OpenAI's list of tokens has no merges; Hugging Face's file of the same vocabulary has."""
    import base64

    state = json.loads(third_party("tokenizers/whisper_tokenizer.json").read_text())
    lines = third_party("whisper/multilingual.tiktoken").read_text().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    wanted = [tuple(map(from_byte_level, merge.split(" "))) for merge in state["model"]["merges"]]
    assert merges_of_ranks(tokens) == wanted


# ---------------------------------------------------------------- bad ones
def fails(path: Path, data: bytes, error=ModelFormatError, match: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(error, match=match) as raised:
        slimrt.convert(path, path.with_suffix(".gguf"), progress=False)
    assert path.name in str(raised.value)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_fixture_has_no_tensors():
    with pytest.raises(ModelFormatError, match="for-tests-ggml-tiny.en.bin: tensor 'encoder.conv1.weight' is missing"):
        read_ggml_bin(third_party("whisper/for-tests-ggml-tiny.en.bin"))


@pytest.mark.parametrize("part", ["magic", "sizes", "filters", "tokens", "names", "tensors", "last byte"])
def test_cut_off(part, whole, tmp_path):
    start = 48 + 8 + 4 * 80 * 201
    keep = {"magic": 5, "sizes": 40, "filters": 400, "tokens": start + 100, "last byte": len(whole) - 1}
    body = start + 4 + sum(4 + len(token) for token in TOKENS)
    keep |= {"names": body + 20, "tensors": body + 2000}
    fails(tmp_path / "ggml.bin", whole[: keep[part]], match=r"cut off in .* \(at byte \d+ of \d+\)")


def test_cut_off_anywhere(whole, tmp_path):
    """Between two tensors nothing is cut off but the others are missing."""
    for keep in np.random.default_rng(0).integers(4, len(whole), 60):
        fails(tmp_path / "ggml.bin", whole[:keep], match="cut off in|is missing")


SIZES = {
    "another number of filters": ({"n_mels": 128}, "80 mel filters, but n_mels is 128"),
    "negative": ({"n_text_layer": -1}, "n_text_layer is -1, not from 0"),
    "absurd": ({"n_audio_state": 2**30}, "n_audio_state is 1073741824, not from 0"),
    "no layers": ({"n_audio_layer": 0}, "encoder_layers is 0"),
    "other heads": ({"n_text_head": 2}, "attention_heads"),
    "another width": ({"n_audio_state": 32, "n_text_state": 32}, r"expected \[32, 80, 3\]"),
    "a layer more": ({"n_text_layer": 3}, "'decoder.blocks.2.*is missing"),
    "a layer less": ({"n_audio_layer": 1}, "'encoder.blocks.1.*has no place"),
    "fewer tokens than the text has": ({"n_vocab": 200}, "leave -1569 languages"),
    "too many languages": ({"n_vocab": 51865}, "leave 50096 languages"),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit(case, whole, tmp_path):
    changes, match = SIZES[case]
    changed = whisper_bin.header(N_VOCAB, **changes) + whole[48:]
    fails(tmp_path / "ggml.bin", changed, (ModelFormatError, UnsupportedError), match)


def test_tensors_that_do_not_fit(whole, weights, tmp_path):
    path, values = tmp_path / "ggml.bin", weights["model.encoder.layer_norm.weight"]
    fails(path, whole + whisper_bin.tensor("model.encoder.layer_norm.weight", values, Kind.F32), match="occurs twice")
    other = whisper_bin.tensor("model.surprise.weight", values, Kind.F32)
    fails(path, whole + other, UnsupportedError, "'surprise.weight' has no place")
    strange = bytearray(other)
    struct.pack_into("<i", strange, 8, 4)  # Q4_2, which GGML dropped
    fails(path, whole + bytes(strange), UnsupportedError, "of GGML's type 4, which nothing reads")
    struct.pack_into("<i", strange, 0, 5)
    fails(path, whole + bytes(strange), match="number of dimensions is 5, not from 0 to 4")
    struct.pack_into("<3i", strange, 0, 1, 15, 8)
    fails(path, whole + bytes(strange), match="is Q8_0 of 1 dimensions")
    unreadable = other.replace(b"surprise", b"surpris\xff")
    fails(path, whole + unreadable, match="name is not UTF-8")


def test_blocks_of_an_old_layout(weights, tmp_path):
    source = whisper_bin.write_bin(tmp_path / "ggml.bin", TOKENS, weights, Kind.Q5_0, ftype=1008)
    with pytest.raises(UnsupportedError, match="version 1 of GGML's blocks.*quantise the unquantised model again"):
        read_ggml_bin(source)


def test_tokens_that_are_not_whisper_s(weights, tmp_path):
    for tokens, match in (
        (TOKENS[1:] + [b"x" * 9], "lacks some of the 256 bytes"),
        ([*TOKENS[:-1], b"qqq"], "token 259, b'qqq', is no union"),
    ):
        with pytest.raises(ModelFormatError, match=match):
            read_ggml_bin(whisper_bin.write_bin(tmp_path / "ggml.bin", tokens, weights, Kind.F16))
