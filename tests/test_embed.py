# SPDX-License-Identifier: Apache-2.0
"""Texts as vectors: what Hugging Face's models make of them, alone and in a batch."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, TESTS, relative
from served import served
from slimrt.modelfile.gguf import read_gguf, uint32, write_gguf
from slimrt.modelfile.hf.directory import read_hf

SHIPPED = TESTS.parent / "models"
IDS = [[1, 5, 40, 7, 9], [1, 88, 2], [1, 60, 61, 62, 63, 64, 3]]


def pooled_as(said, folder):
    """tale-llama in a file that names this pooling by GGUF's number; None: none."""
    model = read_gguf(SHIPPED / "tale-llama.gguf")
    fields = {} if said is None else {"llama.pooling_type": uint32(said)}
    write_gguf(folder / "pooled.gguf", model.with_metadata(fields), show_progress=False)
    return folder / "pooled.gguf"


def pooled(states, pooling):
    return states[-1] if pooling == "last" else states.mean(0)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["qwen2_mha", "gpt2_erf"])
def test_states_are_those_of_hugging_face(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    theirs = transformers.AutoModel.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [theirs(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy() for ids in IDS]
    with slimrt.Model(GOLDEN / name, cache_type="f32", n_seqs=3) as model:
        for got, states in zip(model.embed(IDS, pooling=None, normalize=False), wanted, strict=True):
            assert relative(got, states) < 1e-5
        for pooling in ("mean", "last"):
            expected = np.stack([pooled(states, pooling) for states in wanted])
            assert relative(model.embed(IDS, pooling=pooling, normalize=False), expected) < 1e-5
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            assert relative(model.embed(IDS, pooling=pooling), expected) < 1e-5


@pytest.mark.oracle
def test_of_t5_it_is_the_encoders_output(seq2seq):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    theirs = transformers.UMT5EncoderModel.from_pretrained(seq2seq("umt5")).eval()
    ids = [[5, 4, 7, 1], [9, 1]]
    with torch.no_grad():
        wanted = [theirs(input_ids=torch.tensor([one])).last_hidden_state[0].numpy() for one in ids]
    with slimrt.Model(seq2seq("umt5"), n_seqs=2) as model:
        for got, states in zip(model.embed(ids, pooling=None, normalize=False), wanted, strict=True):
            assert relative(got, states) < 1e-5


@pytest.mark.parametrize("name", ["tale-llama", "tale-t5"])
def test_a_batch_is_its_texts_one_by_one(name):
    texts = ["Anna was a baker", "lantern", "The password of Tom is", "x"]
    with slimrt.Model(SHIPPED / f"{name}.gguf", n_ctx=64, n_seqs=3) as model:
        for pooling in ("mean", "last"):
            together = model.embed(texts, pooling=pooling)
            assert together.dtype == np.float32 and together.shape == (4, model.info()["d_model"])
            np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
            for text, vector in zip(texts, together, strict=True):
                assert relative(model.embed(text, pooling=pooling), vector) < 1e-5
        assert model.embed([]).shape[0] == 0 and model.embed([], pooling=None) == []


def test_texts_computed_together_are_few_calls_of_the_engine(model, tiny, monkeypatch):
    calls = []
    with slimrt.Model(tiny, n_ctx=64, n_seqs=2) as two:
        engine = two._runtime._engine

        class Counting:
            def __getattr__(self, name):
                return getattr(engine, name)

            def append(self, items, **options):
                calls.append(len(items))
                return engine.append(items, **options)

        two._runtime._engine = Counting()
        two.embed(["a", "b", "c"])
    assert calls == [2, 1]


@pytest.mark.parametrize(("said", "pooling"), [(None, "mean"), (1, "mean"), (3, "last")])
def test_a_file_says_how_texts_are_pooled(said, pooling, tmp_path):
    with slimrt.Model(pooled_as(said, tmp_path), n_ctx=64) as model:
        wanted = model.embed("Anna was a baker", pooling=pooling)
        assert np.array_equal(model.embed("Anna was a baker"), wanted)
        assert np.array_equal(model.create_embedding("Anna was a baker")["data"][0]["embedding"], wanted)


def test_over_http_too(tmp_path):
    pytest.importorskip("uvicorn")  # the extra `serve`
    path = pooled_as(3, tmp_path)
    with served(tmp_path, "-c", "64", model=path) as server, slimrt.Model(path, n_ctx=64) as model:
        got = server.ask("/v1/embeddings", {"input": "Anna was a baker"}).json["data"][0]["embedding"]
        assert np.allclose(got, model.embed("Anna was a baker", pooling="last"), atol=1e-3)


@pytest.mark.parametrize("said", [0, 2, 4])
def test_a_pooling_that_is_not_there_has_to_be_told(said, tmp_path):
    with slimrt.Model(pooled_as(said, tmp_path), n_ctx=64) as model:
        with pytest.raises(slimrt.UnsupportedError, match=f"llama.pooling_type is {said}.: in Python, embed"):
            model.embed("Anna")
        assert model.embed("Anna", pooling="last").shape == (model.info()["d_model"],)


@pytest.mark.parametrize(
    ("config", "further", "said", "warning"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, [], 3, None),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, [], 1, None),
        ({"pooling_mode": "lasttoken"}, [], 3, None),
        ({"pooling_mode_cls_token": True}, [], 2, "is cls, which embed.. does not have"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, [], 0, "is max and mean, which embed"),
        (None, [], 0, "is none that is known"),
        ({"pooling_mode": "mean"}, ["sentence_transformers.models.Dense"], 1, "names Dense, which embed.. leaves out"),
    ],
)
def test_a_directory_of_sentence_transformers(config, further, said, warning, tmp_path):
    directory = shutil.copytree(GOLDEN / "qwen2_mha", tmp_path / "model")
    kinds = [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")] + further
    modules = [{"idx": i, "name": str(i), "path": "1_Pooling", "type": kind} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    before = len(read_hf(GOLDEN / "qwen2_mha")[1])
    model, warnings = read_hf(directory)
    assert model.value("qwen2.pooling_type") == said and len(warnings) == before + (warning is not None)
    assert warning is None or re.search(warning, warnings[-1])
    (directory / "modules.json").write_text("[1]")
    with pytest.raises(slimrt.ModelFormatError, match="modules.json: not a list of modules"):
        read_hf(directory)


def test_embedding_leaves_no_rows_behind(model):
    for _ in range(20):  # 64 rows in all
        model.embed("the cat sat on the mat")
    with pytest.raises(slimrt.ContextOverflowError, match="text 1 has 200 tokens, the context holds 64"):
        model.embed([[1, 2], [5] * 200])


def test_what_cannot_be_embedded_is_refused(model):
    with pytest.raises(slimrt.UnsupportedError, match="pooling 'cls' is not supported; supported: 'mean', 'last'"):
        model.embed("a", pooling="cls")
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        model.embed([[5], []])
    with pytest.raises(TypeError, match="got NoneType"):
        model.embed(None)
    with slimrt.Model(SHIPPED / "tale-whisper.gguf") as whisper:
        with pytest.raises(slimrt.UnsupportedError, match="cannot embed a text"):
            whisper.embed([[5]])
