# SPDX-License-Identifier: Apache-2.0
"""Beam search of models that continue texts, beside transformers' generate() on tiny random ones."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFValueType

import slimrt
from conftest import GOLDEN
from slimrt.modelfile.gguf import ModelData, array, read_gguf, string, uint32, write_gguf

pytestmark = pytest.mark.oracle

BEAMS = 4


PROMPTS = np.random.default_rng(1).integers(3, 100, (4, 7)).tolist()


def theirs_of(model, prompt, end=None, **options) -> list[list[int]]:
    """What transformers makes of a prompt, without the end token and what fills up after it."""
    import torch

    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=12,
            do_sample=False, eos_token_id=end, pad_token_id=end, **options,
        ).tolist()  # fmt: skip
    texts = [tokens[len(prompt) :] for tokens in found]
    return [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in texts]


@pytest.fixture(scope="module", params=["llama_mha", "gpt2_tanh"])
def pair(request, convert, tmp_path_factory):
    """(theirs, ours) and what ends a text, a token that both choose often; ours has a vocabulary, which says so."""
    transformers = pytest.importorskip("transformers")
    directory = GOLDEN / request.param
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    end = int(np.bincount(np.concatenate([theirs_of(theirs, prompt)[0] for prompt in PROMPTS])).argmax())
    n_vocab = theirs.config.vocab_size
    tokens = [f"w{i}" for i in range(n_vocab)]
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
    with slimrt.Model(path, n_ctx=64, n_seqs=BEAMS, cache_type="f32") as ours:
        yield theirs, ours, end


@pytest.mark.parametrize(
    ("beams", "penalty", "early"),
    [(2, 1.0, False), (BEAMS, 0.0, False), (BEAMS, 1.0, True), (BEAMS, 2.0, False), (BEAMS, -1.0, True)],
)
def test_beams_are_those_of_transformers(pair, beams, penalty, early):
    theirs, ours, end = pair
    options, ended = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}, 0
    for prompt in PROMPTS:
        answers = ours.generate(prompt, n=2, max_tokens=12, **options)
        wanted = theirs_of(theirs, prompt, end, num_return_sequences=2, **options)
        assert [list(one.tokens) for one in answers] == wanted, prompt
        ended += sum(one.finish_reason == "stop" for one in answers)
    assert ended > 0 or penalty > 1  # then longer ones win
