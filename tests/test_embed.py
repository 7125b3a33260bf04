# SPDX-License-Identifier: Apache-2.0
"""Texts as vectors: what Hugging Face's models make of them, alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, TESTS, relative

SHIPPED = TESTS.parent / "models"
IDS = [[1, 5, 40, 7, 9], [1, 88, 2], [1, 60, 61, 62, 63, 64, 3]]


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
