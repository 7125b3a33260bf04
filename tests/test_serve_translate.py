# SPDX-License-Identifier: Apache-2.0
"""Translations over HTTP: source and target beside a prompt; what such models do not do is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slimrt
from served import CHAT, Answer, Served, events, served
from test_translate import saved

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.unsanitized, pytest.mark.filterwarnings("ignore")]  # Python: the core is tested by others

TEXT = "We hold these truths."
PAIR = {"source": "eng", "target": "deu_Latn"}


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    """A server of a tiny NLLB, and the same model in this process."""
    directory = tmp_path_factory.mktemp("nllb")
    saved("nllb", directory)
    with served(directory, "--parallel", "4", model=directory) as server:
        with slimrt.Model(directory, n_seqs=4, progress=False) as model:
            yield server, model


def ask(server: Served, prompt: Any = TEXT, **fields: Any) -> Answer:
    return server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 8} | fields)


def test_translations_are_the_librarys(nllb):
    """Of one text and several, whole and as events, n of each, with logprobs; a prompt counts with its language."""
    server, model = nllb
    bias = dict.fromkeys(model.tokenizer.special_tokens.values(), -100.0)  # what the text does not show
    asked, options = PAIR | {"logit_bias": bias}, {"logit_bias": bias, "max_tokens": 8}
    texts = [TEXT, "All men, and"]
    wanted = model.translate(texts, **PAIR, **options)
    first, other = wanted[0].text, model.translate(TEXT, source="eng", target="fra", **options).text
    assert first and len({first, other, wanted[1].text}) == 3
    answer = ask(server, texts, n=2, **asked).json
    assert [one["text"] for one in answer["choices"]] == [one.text for one in wanted for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(one.usage.prompt_tokens for one in wanted)
    assert ask(server, **asked | {"target": "fra"}).json["choices"][0]["text"] == other
    *told, done = events(ask(server, stream=True, **asked).body)
    assert "".join(one["choices"][0]["text"] for one in told) == first and done == "[DONE]"
    shown = ask(server, logprobs=1, **asked).json["choices"][0]["logprobs"]["token_logprobs"]
    alone = model.translate(TEXT, **PAIR, **options, logprobs=1)
    assert shown == pytest.approx([one.logprob for one in alone.logprobs], abs=1e-3)
    cut = ask(server, stop=[first[-2:]], **asked).json["choices"][0]
    assert cut["text"] == first.partition(first[-2:])[0] and cut["finish_reason"] == "stop"


def test_prompts_of_ids_are_encoded_as_they_are(nllb):
    server, model = nllb
    ids = [model.tokenizer.languages["eng_Latn"], *model.tokenize(TEXT, add_special_tokens=True)]
    wanted = model.text2text(ids, max_tokens=8).text
    assert ask(server, ids, source=None, target=None).json["choices"][0]["text"] == wanted
    vector = np.array(server.ask("/v1/embeddings", {"input": ids}).json["data"][0]["embedding"])
    np.testing.assert_allclose(vector, model.embed(ids), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "target", "name both languages, source and target"),
        ({"source": "eng"}, "source", "name both languages"),
        (PAIR | {"source": "engl"}, "source", "no language 'engl'"),
        (PAIR | {"target": "deu_Lat"}, "target", "no language 'deu_Lat'; of the 202 that it knows: deu_Latn"),
        (PAIR | {"target": 3}, "target", "target must be a text"),
        (PAIR | {"prompt": [5, 6, 2]}, "source", "a prompt of ids is encoded as it is"),
        ({"prompt": [TEXT, [5, 6, 2]], "target": "deu"}, "target", "a prompt of ids is encoded as it is"),
        (PAIR | {"prompt": TEXT * 20}, "prompt", "the encoder takes 96"),
        (PAIR | {"echo": True, "logprobs": 1}, "prompt", "cannot score a prompt"),
        (PAIR | {"lookup": True}, "lookup", "drafts nothing"),
        (PAIR | {"on_overflow": "shift"}, "on_overflow", "cannot be shifted"),
        ({"src_lang": "eng"}, "src_lang", "here it is called source"),
    ],
)
def test_what_is_wrong_is_named(nllb, fields, param, message):
    answer = ask(nllb[0], **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]


def test_what_such_models_do_not_do(nllb):
    """Chats, and vectors of texts in no language."""
    server, _ = nllb
    chat = server.chat()
    assert chat.status == 400 and "cannot chat" in chat.error["message"]
    assert "over HTTP /v1/completions" in chat.error["message"]
    assert server.chat(**PAIR).error["param"] == "source"
    vector = server.ask("/v1/embeddings", {"input": TEXT})
    assert (vector.status, vector.error["param"]) == (400, "input")
    assert "a text of this model is in a language" in vector.error["message"]
    assert server.ask("/props").json["chats"] is False


def test_languages_in_front_of_a_text(tmp_path):
    """T5 reads them as words, and goes without; a language model has none."""
    file = Path(__file__).parent.parent / "models" / "tale-t5.gguf"
    with served(tmp_path, model=file) as server, slimrt.Model(file) as model:
        for pair in ({"source": "English", "target": "German"}, {}):
            wanted = model.translate(TEXT, **pair, max_tokens=8)
            answer = ask(server, **pair).json
            assert answer["choices"][0]["text"] == wanted.text
            assert answer["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
        assert ask(server, target="German").error["param"] == "target"
        vector = server.ask("/v1/embeddings", {"input": TEXT}).json["data"][0]["embedding"]
        np.testing.assert_allclose(vector, model.embed(TEXT), atol=1e-5)
    with served(tmp_path, model=CHAT) as server:
        answer = ask(server, target="German")
        assert (answer.status, answer.error["param"]) == (400, "target")
        assert "cannot translate: that takes an encoder-decoder of texts" in answer.error["message"]


def test_beams(nllb):
    """The library's, whole and for several prompts; what goes with none is refused, with the reason."""
    server, model = nllb
    texts, options = [TEXT, "All men, and"], {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}
    wanted = model.translate(texts, **PAIR, **options, max_tokens=8)
    answer = ask(server, texts, **PAIR, **options).json
    assert [one["text"] for one in answer["choices"]] == [one.text for one in wanted]
    assert answer["usage"]["completion_tokens"] == sum(len(one.tokens) for one in wanted)
    assert [one.tokens for one in wanted] != [one.tokens for one in model.translate(texts, **PAIR, max_tokens=8)]
    for fields, param, message in (
        ({"stream": True}, "stream", "beam search chooses its text at the end, which no stream can wait for"),
        ({"n": 2}, "n", "num_beams gives the likeliest text, not n=2"),
        ({"num_beams": 5}, "num_beams", "needs 5 sequences at once, the model has 4"),
        ({"num_beams": 0}, "num_beams", "num_beams must be at least 1"),
        ({"num_beams": True}, "num_beams", "num_beams must be a number"),
        ({"temperature": 0.5}, "temperature", "does not go with num_beams=3"),
        ({"use_beam_search": True}, "use_beam_search", "num_beams says how many beams"),
    ):
        refused = ask(server, **PAIR, **options | fields)
        assert (refused.status, refused.error["param"]) == (400, param) and message in refused.error["message"]
    assert ask(server, **PAIR).status == 200


def test_least_tokens_and_words_that_never_come(nllb):
    server, model = nllb
    ends = ask(server, **PAIR, logit_bias={str(model.tokenizer.eos_id): 100}).json  # which comes at once
    assert ends["usage"]["completion_tokens"] == 0
    longer = {"min_tokens": 5, "logit_bias": {str(model.tokenizer.eos_id): 100}}
    assert ask(server, **PAIR, **longer).json["usage"]["completion_tokens"] == 5
    first = model.translate(TEXT, **PAIR, max_tokens=1).tokens[0]
    options = {"suppress_tokens": [first], "no_repeat_ngram_size": 1}
    wanted = model.translate(TEXT, **PAIR, **options, max_tokens=8)
    assert ask(server, **PAIR, **options).json["choices"][0]["text"] == wanted.text and first not in wanted.tokens
    for fields, param, message in (
        ({"min_tokens": 9}, "min_tokens", "min_tokens=9 is more than max_tokens=8"),
        ({"min_tokens": "5"}, "min_tokens", "must be a whole number"),
        ({"min_tokens": True}, "min_tokens", "must be a number"),
        ({"suppress_tokens": [10**6]}, "suppress_tokens", "suppress_tokens names token 1000000"),
        ({"suppress_tokens": "a"}, "suppress_tokens", "must be a sequence of token ids"),
        ({"min_new_tokens": 3}, "min_new_tokens", "here it is called min_tokens"),
    ):
        refused = ask(server, **PAIR, **fields)
        assert (refused.status, refused.error["param"]) == (400, param) and message in refused.error["message"], fields


def test_beams_of_a_model_that_continues_texts(tmp_path):
    with served(tmp_path, "--parallel", "3", model=CHAT) as server, slimrt.Model(CHAT, n_seqs=3) as model:
        wanted = model.generate("The king", num_beams=3, max_tokens=8)
        assert ask(server, "The king", num_beams=3).json["choices"][0]["text"] == wanted.text
        chat = server.chat(num_beams=2, max_tokens=6, temperature=0)
        assert chat.status == 200 and chat.json["choices"][0]["message"]["content"]
        assert server.chat(num_beams=2, max_tokens=6, stream=True).error["param"] == "stream"
