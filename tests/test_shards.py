# SPDX-License-Identifier: Apache-2.0
"""A model in several files, as gguf-split writes them: the first stands for all."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

import slimrt
from conftest import GREEDY, PROMPT, open_engine
from gguf_shapes import finish
from slimrt import _core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import read_gguf, uint32, write_gguf
from slimrt.modelfile.reading import read_model, source_hash
from tiny_model import write_tiny

N = 3


def split(source: Path, folder: Path, n: int = N, **changes: dict[int, object]) -> list[Path]:
    """The shards of a model. changes: key of every shard -> what some shards have there, by their number."""
    model = read_gguf(source)
    writer = gguf.GGUFWriter(folder / "m.gguf", model.arch, split_max_tensors=-(-len(model.tensors) // n))
    for key, value in model.metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value.value, value.type, value.sub_type)
    for tensor in model.tensors.values():
        writer.add_tensor(tensor.name, tensor.load(), raw_dtype=tensor.type)
    add_shard_kv_data = writer.add_shard_kv_data

    def changed() -> None:
        add_shard_kv_data()
        for key, values in changes.items():
            for shard, value in values.items():
                kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
                writer.kv_data[shard][key] = gguf.gguf_writer.GGUFValue(value, kind)

    writer.add_shard_kv_data = changed  # type: ignore[method-assign]
    finish(writer, folder)
    return [folder / f"m-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory) -> list[Path]:
    return split(tiny, tmp_path_factory.mktemp("shards"))


@pytest.fixture
def copies(shards, tmp_path) -> list[Path]:
    return [Path(shutil.copy(shard, tmp_path)) for shard in shards]


def logits(path: Path) -> np.ndarray:
    engine = open_engine(path)
    return engine.append([(engine.new_sequence(), np.array([3, 1, 4, 1, 5], np.int32))])


def test_shards_are_the_whole_model(tiny, shards, run):
    assert np.array_equal(logits(shards[0]), logits(tiny))
    file = _core.GgufFile(str(shards[0]))
    assert file.paths == [str(shard) for shard in shards] and file.path == str(shards[0])
    assert file.tensors() == _core.GgufFile(str(tiny)).tensors()
    with slimrt.Model(shards[0], n_ctx=64) as model, slimrt.Model(tiny, n_ctx=64) as whole:
        text = model.generate(PROMPT, max_tokens=5, **GREEDY).text
        assert text == whole.generate(PROMPT, max_tokens=5, **GREEDY).text
    code, out, _ = run("inspect", shards[0])
    assert code == 0 and f"{len(file.tensors())} tensors" in out and "split.count = 3" in out


def test_shards_are_converted_into_one_file(tiny, shards, tmp_path):
    out, plain = tmp_path / "one.gguf", tmp_path / "plain.gguf"
    slimrt.convert(shards[0], out, cache="k", progress=False)
    slimrt.convert(tiny, plain, cache="k", progress=False)
    made, wanted = read_gguf(out), read_gguf(plain)
    assert not [key for key in _core.GgufFile(str(out)).keys() if key.startswith("split.")]
    assert list(made.tensors) == list(wanted.tensors)
    for name, tensor in made.tensors.items():
        assert np.array_equal(tensor.load(), wanted.tensors[name].load()), name
    assert made.metadata.keys() == wanted.metadata.keys()


def test_the_hash_of_a_source_is_of_all_its_shards(copies):
    before = source_hash(copies[0])
    raw = bytearray(copies[2].read_bytes())
    raw[-40] ^= 1
    copies[2].write_bytes(raw)
    assert source_hash(copies[0]) != before


def test_no_shard_is_written_over(copies):
    with pytest.raises(ValueError, match="is the source itself"):
        slimrt.convert(copies[0], copies[2], progress=False)


def test_a_change_of_any_shard_is_noticed(copies):
    file = _core.GgufFile(str(copies[0]))
    file.require_unchanged()
    with copies[1].open("ab") as more:
        more.write(b"x")
    with pytest.raises(OSError, match="m-00002-of-00003.gguf' was changed while it was in use"):
        file.require_unchanged()


def test_shards_move_to_huge_pages_together(copies):
    file = _core.GgufFile(str(copies[0]))
    whole = file.bytes().copy()
    moved = file.move_to_huge_pages(0, len(whole))
    assert np.array_equal(file.bytes(), whole)
    for copy in copies if moved else []:
        copy.write_bytes(b"")  # a mapping would die
    assert np.array_equal(file.bytes(), whole)


def test_only_the_first_shard_is_named(copies):
    for tensors in (True, False):
        with pytest.raises(UnsupportedError, match="is shard 2 of 3: name the first, '.*m-00001-of-00003.gguf'"):
            _core.GgufFile(str(copies[1]), tensors=tensors)
    renamed = copies[0].rename(copies[0].with_name("model.gguf"))
    with pytest.raises(UnsupportedError, match="shard 1 of 3, whose names end with -00001-of-00003.gguf and so on"):
        read_model(renamed)


def test_a_shard_that_is_missing_or_cut_is_named(copies, run):
    raw = copies[1].read_bytes()
    copies[1].write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ModelFormatError, match="m-00002-of-00003.gguf: tensor .* but only"):
        _core.GgufFile(str(copies[0]))
    copies[1].unlink()
    with pytest.raises(ModelFormatError, match="m-00002-of-00003.gguf: is missing: the model is in 3 shards"):
        _core.GgufFile(str(copies[0]))
    with pytest.raises(slimrt.ModelFormatError, match="is missing"):
        slimrt.Model(copies[0])
    code, _, err = run("generate", copies[0], "-p", PROMPT)
    assert code == 1 and "m-00002-of-00003.gguf: is missing" in err and err.count("\n") == 1
    copies[1].symlink_to(copies[1])  # there, but not to be read
    with pytest.raises(OSError, match="cannot read '.*m-00002-of-00003.gguf': Too many levels"):
        _core.GgufFile(str(copies[0]))


def test_shards_in_another_order_are_refused(copies):
    copies[1].rename(copies[1].with_name("x"))
    copies[2].rename(copies[1])
    copies[1].with_name("x").rename(copies[2])
    with pytest.raises(ModelFormatError, match="m-00002-of-00003.gguf: says that it is shard 3 of 3, not 2 of 3"):
        _core.GgufFile(str(copies[0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.count": {1: 4}}, "m-00002-of-00003.gguf: says that it is shard 2 of 4, not 2 of 3"),
        ({"split.no": {2: 1}}, "m-00003-of-00003.gguf: says that it is shard 2 of 3, not 3 of 3"),
        ({"general.architecture": {1: "qwen2"}}, r"m-00002-of-00003.gguf: is a shard of another model \('qwen2', not"),
        ({"split.tensors.count": {2: 99}}, "m-00003-of-00003.gguf: is a shard of a model of 99 tensors, not of 20"),
        ({"split.tensors.count": dict.fromkeys(range(3), 22)}, "m-00001-of-00003.gguf: key .* is 22, .* hold 20"),
    ],
)
def test_shards_that_disagree_are_refused(tiny, tmp_path, changes, message):
    first = split(tiny, tmp_path, **changes)[0]
    with pytest.raises(ModelFormatError, match=message):
        _core.GgufFile(str(first))


def test_shards_whose_data_may_begin_at_either_place_are_refused(tiny, tmp_path):
    """Python's writer aligns all as only the first one says; gguf-split each as it says itself."""
    with pytest.raises(UnsupportedError, match="00002-of-00003.*alignment. is 32 .or left out., and the first .* 16"):
        _core.GgufFile(str(split(tiny, tmp_path, **{"general.alignment": {0: 16}})[0]))


def test_shards_of_another_model_are_refused(tiny, copies, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    foreign = split(write_tiny(other / "more.gguf", n_layers=3), other)
    shutil.copy(foreign[1], copies[1])
    with pytest.raises(ModelFormatError, match="m-00002-of-00003.gguf: is a shard of a model of 29 tensors, not of 20"):
        _core.GgufFile(str(copies[0]))
    numbered = split(tiny, other, **{"split.no": {0: 1, 1: 0}})  # same sizes, the first one's tensors
    shutil.copy(numbered[0], copies[1])
    with pytest.raises(ModelFormatError, match="m-00002-of-00003.gguf: has tensor '.*', which a shard before it"):
        _core.GgufFile(str(copies[0]))


def test_one_shard_of_one_is_a_whole_file(tiny, tmp_path):
    path = tmp_path / "any-name.gguf"
    write_gguf(path, read_gguf(tiny).with_metadata({"split.count": uint32(1)}), show_progress=False)
    assert np.array_equal(logits(path), logits(tiny))
