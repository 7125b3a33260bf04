# SPDX-License-Identifier: Apache-2.0
"""Files with something changed at random: an error of slimrt's own kind, or it works; nothing else."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from pathlib import Path

import pytest

import slimrt
from conftest import GOLDEN
from slimrt import core
from slimrt.modelfile.reading import read_model
from slimrt.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.unsanitized  # Python, and libraries of others
WEIGHTS = "model.safetensors"
TEXT = "the cat sat on the mat; \u00e4 \U0001f600 <s> 12"
ODD = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**32 - 1,
    2**63,
    10**400,
    0.5,
    1e308,
    float("inf"),
    "",
    "x",
    [],
    [1],
    [[1]],
    {},
    {"a": 1},
]


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutant(value, rng: random.Random):
    """A copy with one value, anywhere in it, replaced or left out."""
    changed = copy.deepcopy(value)
    *way, last = rng.choice(list(places(value)))
    inner = changed
    for key in way:
        inner = inner[key]
    if rng.random() < 0.2:
        del inner[last]
    else:
        inner[last] = rng.choice(ODD)
    return changed


def tolerate(read) -> None:
    """It works, or says in slimrt's own words why not."""
    try:
        read()
    except (slimrt.SlimrtError, OSError):
        pass


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama_mha", tmp_path / "model"))


@pytest.mark.parametrize("name", ["llama_mha", "phi3", "gpt2_erf", "llama_yarn", "mistral_window"])
def test_configs(name, tmp_path):
    directory = Path(shutil.copytree(GOLDEN / name, tmp_path / "model"))
    rng, config = random.Random(name), json.loads((directory / "config.json").read_text())
    for _ in range(150):
        (directory / "config.json").write_text(json.dumps(mutant(config, rng)))
        tolerate(lambda: read_model(directory))


def test_headers_of_safetensors(directory):
    rng, raw = random.Random(1), (directory / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    for _ in range(150):
        text = json.dumps(mutant(header, rng)).encode()
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
        tolerate(lambda: [tensor.load() for tensor in read_model(directory)[0].tensors.values()])


def test_bytes_of_safetensors(directory):
    rng, raw = random.Random(2), (directory / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    for _ in range(150):
        bad = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(8 + size)] = rng.randrange(256)
        (directory / WEIGHTS).write_bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])])
        tolerate(lambda: [tensor.load() for tensor in read_model(directory)[0].tensors.values()])


@pytest.mark.parametrize("name", ["llama_gqa_tied", "phi3", "gpt2_erf", "t5"])
def test_planning_what_a_gguf_says(name, convert, seq2seq, tmp_path):
    """Configuration, shapes of weights and planner on files with other numbers in their header."""
    rng, path = random.Random(name), tmp_path / "bad.gguf"
    raw = Path(convert(seq2seq("t5") if name == "t5" else GOLDEN / name)).read_bytes()
    header = raw.index(b"\0" * 64) if b"\0" * 64 in raw[:65536] else min(len(raw), 16384)
    for _ in range(250):
        bad = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(8, max(header, 4096))
            bad[at : at + 4] = rng.choice(
                [rng.randbytes(1), b"\xff" * 4, b"\0" * 4, struct.pack("<I", 1 << rng.randrange(32))]
            )
        path.write_bytes(bad)
        tolerate(lambda: core.plan(str(path), n_ctx=rng.choice([0, 1, 64]), cache=rng.choice(["auto", "kv", "k", "x"])))


def byte_level(merges=("a b",), **model):
    """A small tokenizer.json."""
    tokens = ["<s>", "a", "b", "c", "ab", "\u0120"]
    state = {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": list(merges)}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": state | model,
    }


def unigram():
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}
    model["vocab"] = [["<unk>", 0.0], ["\u2581", -1.0], ["a", -2.0], ["\u2581the", -3.0], ["cat", -3.5]]
    return byte_level() | {"model": model, "pre_tokenizer": metaspace, "decoder": metaspace, "post_processor": None}


def written(folder: Path, value) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(value))
    return path


def use(path: Path) -> None:
    tokenizer = Tokenizer(path)
    tokenizer.decode(tokenizer.encode(TEXT))


@pytest.mark.parametrize("make", [byte_level, unigram])
def test_tokenizers(make, tmp_path):
    good = make()
    use(written(tmp_path, good))
    rng = random.Random(3)
    for _ in range(400):
        bad = written(tmp_path, mutant(good, rng))
        tolerate(lambda path=bad: use(path))


def test_one_huge_id(tmp_path):
    """It took a list of 34 GB."""
    bad = byte_level()
    bad["model"]["vocab"]["z"] = 2**32 - 1
    with pytest.raises(slimrt.ModelFormatError, match="id 4294967295, and there are 7 tokens"):
        Tokenizer(written(tmp_path, bad))


def test_what_the_library_panics_of(tmp_path):
    undefined = byte_level()
    undefined["post_processor"]["single"][0]["SpecialToken"]["id"] = "<none>"
    no_union = byte_level(merges=("b c",))
    no_unknown = unigram()
    no_unknown["model"]["unk_id"] = None
    for bad, words in (
        (undefined, "parts do not fit each other"),
        (no_union, "not a tokenizer.json: Token `bc` out of vocabulary"),
        (no_unknown, "cannot encode this text"),
    ):
        with pytest.raises(slimrt.ModelFormatError, match=words):
            use(written(tmp_path, bad))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1e308),
        ("partial_rotary_factor", 1e308),
        ("original_max_position_embeddings", 2**63),
        ("bos_token_id", [[1], {"a": 2}]),
        ("architectures", 7),
    ],
)
def test_configs_that_were_found(key, value, tmp_path):
    """Each ended in a TypeError, an OverflowError or the like."""
    for name in ("phi3", "llama_mha"):
        directory = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
        config = json.loads((directory / "config.json").read_text()) | {key: value}
        (directory / "config.json").write_text(json.dumps(config))
        tolerate(lambda path=directory: read_model(path))


@pytest.mark.parametrize(
    ("key", "value"), [("block_count", 0x800002), ("embedding_length", 0xFFFFFFF0), ("embedding_length", 0x1D000020)]
)
def test_conversion_refuses_the_sizes_that_loading_refuses(key, value, convert, tmp_path):
    """It believed them: for 45 s, or with 4 GB."""
    from slimrt.modelfile.gguf import read_gguf, uint32, write_gguf

    bad, out = tmp_path / "bad.gguf", tmp_path / "out.gguf"
    model = read_gguf(convert(GOLDEN / "llama_mha"))
    write_gguf(bad, model.with_metadata({f"llama.{key}": uint32(value)}), show_progress=False)
    said = []
    for refuse in (lambda: slimrt.Model(bad), lambda: slimrt.convert(bad, out, cache="k", progress=False)):
        with pytest.raises(slimrt.ModelFormatError, match=f"{key}' is {value}, expected 1 to") as error:
            refuse()
        said.append(str(error.value))
    assert said[0] == said[1] and not out.exists()
