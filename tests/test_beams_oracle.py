# SPDX-License-Identifier: Apache-2.0
"""Beam search of models that continue texts, beside transformers' generate() on tiny random ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGUFValueType

import slimrt
from conftest import GOLDEN
from slimrt.modelfile.gguf import ModelData, array, read_gguf, string, uint32, write_gguf

pytestmark = pytest.mark.oracle

BEAMS = 4


@pytest.fixture(scope="module", params=["llama_mha", "gpt2_tanh"])
def pair(request, convert, tmp_path_factory):
    """(theirs, ours, end token) of one model; ours has a vocabulary, which says what ends a text."""
    transformers = pytest.importorskip("transformers")
    directory = GOLDEN / request.param
    config = json.loads((directory / "config.json").read_text())
    end, n_vocab = config["eos_token_id"], config["vocab_size"]
    tokens = [f"w{i}" for i in range(n_vocab)]
    tokens[end] = "</s>"
    vocabulary = {
        "model": string("llama"),
        "tokens": array(tokens, GGUFValueType.STRING),
        "scores": array([0.0] * n_vocab, GGUFValueType.FLOAT32),
        "token_type": array([3 if id == end else 1 for id in range(n_vocab)], GGUFValueType.INT32),
        "eos_token_id": uint32(end),
    }
    model = read_gguf(convert(directory))
    metadata = model.metadata | {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    path = tmp_path_factory.mktemp("beams") / "model.gguf"
    write_gguf(path, ModelData(metadata, model.tensors), show_progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with slimrt.Model(path, n_ctx=64, n_seqs=BEAMS, cache_type="f32") as ours:
        yield theirs, ours, end


@pytest.mark.parametrize("beams", [2, BEAMS])
@pytest.mark.parametrize(("penalty", "early"), [(0.0, False), (1.0, False), (1.0, True), (2.0, False), (-1.0, True)])
def test_beams_are_those_of_transformers(pair, beams, penalty, early):
    import torch

    theirs, ours, end = pair
    rng, ended = np.random.default_rng(1), 0
    for _ in range(6):
        prompt = [int(id) for id in rng.integers(3, 100, 7)]
        options = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
        with torch.no_grad():
            found = theirs.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, 7, dtype=torch.long), max_new_tokens=12,
                do_sample=False, num_return_sequences=2, eos_token_id=end, pad_token_id=end, **options,
            ).tolist()  # fmt: skip
        wanted = [tokens[7:] for tokens in found]
        wanted = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in wanted]
        answers = ours.generate(prompt, n=2, max_tokens=12, **options)
        assert [list(one.tokens) for one in answers] == wanted, prompt
        ended += sum(one.finish_reason == "stop" for one in answers)
    assert ended > 0 or penalty > 0
