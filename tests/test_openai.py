# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-shaped methods: the texts of generate, in the shapes of llama-cpp-python."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

import slimrt
from conftest import GREEDY, PROMPT
from slimrt.openai.requests import OPTIONS, REFUSED, TOOLS
from slimrt.openai.responses import completion_logprobs
from slimrt.results import TokenLogprob, TopLogprob
from tiny_model import BOS

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = {"temperature": 0.0, "ignore_eos": True}


def test_a_completion_has_its_shape_and_the_text_of_generate(model):
    result = model.generate(PROMPT, max_tokens=6, **GREEDY)
    answer = model.create_completion(PROMPT, max_tokens=6, **PLAIN)
    assert json.loads(json.dumps(answer)) == answer
    assert answer["id"].startswith("cmpl-") and isinstance(answer["created"], int)
    assert {key: answer[key] for key in ("object", "model")} == {"object": "text_completion", "model": "tiny.gguf"}
    assert answer["choices"] == [{"text": result.text, "index": 0, "logprobs": None, "finish_reason": "length"}]
    n_prompt = len(model.tokenize(PROMPT))
    assert answer["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": 6, "total_tokens": n_prompt + 6}
    again = model(PROMPT, max_tokens=6, model="mine", user="me", stop=None, logit_bias=None, **PLAIN)
    assert again["choices"] == answer["choices"] and again["model"] == "mine" and again["id"] != answer["id"]


def test_a_search_that_finds_fewer_texts_than_asked_for(tiny):
    with slimrt.Model(tiny, n_seqs=2) as model:
        answer = model.create_completion(["a", "the cat"], max_tokens=0, n=2, num_beams=2, temperature=0.0, echo=True)
        assert [choice["text"] for choice in answer["choices"]] == ["a", "the cat"]
        assert answer["usage"]["prompt_tokens"] == len(model.tokenize("a")) + len(model.tokenize("the cat"))


def test_why_a_text_ends_in_openais_words(model):
    first = model.generate(PROMPT, max_tokens=6, **GREEDY).text
    stopped = model.create_completion(PROMPT, max_tokens=6, stop=[first[2:4]], **PLAIN)["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == first[: first.index(first[2:4])]
    full = model.create_completion(PROMPT, max_tokens=None, **PLAIN)
    assert full["choices"][0]["finish_reason"] == "length" and full["usage"]["total_tokens"] >= model.n_ctx
    assert len(model.create_completion(PROMPT, **PLAIN)["choices"][0]["text"]) and (
        model.create_completion(PROMPT, **PLAIN)["usage"]["completion_tokens"] == 16
    )


def test_several_prompts_and_answers_come_in_order(model):
    answer = model.create_completion(["a", "the cat"], max_tokens=4, n=2, seed=5, ignore_eos=True)
    wanted = [
        model.generate(prompt, max_tokens=4, seed=5 + i, ignore_eos=True).text
        for i, prompt in enumerate(["a", "a", "the cat", "the cat"])
    ]
    assert [choice["text"] for choice in answer["choices"]] == wanted and len(set(wanted)) == 4
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    n_prompt = len(model.tokenize("a")) + len(model.tokenize("the cat"))
    assert answer["usage"]["prompt_tokens"] == n_prompt and answer["usage"]["completion_tokens"] == 16


def test_chunks_joined_are_the_completion(model):
    whole = model.create_completion(PROMPT, max_tokens=8, logprobs=2, **PLAIN)["choices"][0]
    chunks = list(
        model.create_completion(
            PROMPT, max_tokens=8, logprobs=2, stream=True, stream_options={"include_usage": True}, **PLAIN
        )
    )
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {"text_completion"}
    *pieces, last, counts = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == whole["text"] and len(pieces) > 1
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in pieces)
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["text"] == ""
    assert counts["choices"] == [] and counts["usage"]["completion_tokens"] == 8
    shown = [chunk["choices"][0]["logprobs"] for chunk in (*pieces, last) if chunk["choices"][0]["logprobs"]]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert sum((one[key] for one in shown), []) == whole["logprobs"][key]


def test_echo_scores_the_prompt_as_score_does(model):
    answer = model.create_completion("the cat", max_tokens=2, echo=True, logprobs=3, **PLAIN)["choices"][0]
    result = model.generate("the cat", max_tokens=2, logprobs=3, **GREEDY)
    logprobs, score = answer["logprobs"], model.score("the cat")
    assert answer["text"] == "the cat" + result.text
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    n_prompt = len(score.tokens)
    np.testing.assert_allclose(logprobs["token_logprobs"][1:n_prompt], score.logprobs, rtol=1e-5)
    assert logprobs["token_logprobs"][n_prompt:] == [one.logprob for one in result.logprobs]
    assert "".join(logprobs["tokens"][:n_prompt]) == "the cat" and len(logprobs["tokens"]) == n_prompt + 2
    assert logprobs["text_offset"][n_prompt] == len("the cat")
    for at, top in enumerate(logprobs["top_logprobs"][1:], 1):
        assert top[logprobs["tokens"][at]] == logprobs["token_logprobs"][at]
        assert 2 <= len(top) <= 4  # bytes that are no characters look the same
    alone = model.create_completion("the cat", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert alone["text"] == "the cat" and len(alone["logprobs"]["tokens"]) == n_prompt
    by_ids = model.create_completion(model.tokenize("the cat"), max_tokens=0, echo=True)["choices"][0]
    assert by_ids["text"] == "the cat"


def test_a_chosen_token_is_among_the_likeliest_shown():
    tokens = [TokenLogprob(7, "x", -3.0, (TopLogprob(1, "1", -0.1), TopLogprob(2, "2", -2.0)))]
    assert completion_logprobs(tokens, 2, lambda id: b"y")["top_logprobs"] == [{"y": -0.1, "x": -3.0}]
    shown = completion_logprobs(tokens, 1, lambda id: b"%d" % id, offset=4)
    assert shown == {
        "tokens": ["x"], "text_offset": [4], "token_logprobs": [-3.0], "top_logprobs": [{"1": -0.1, "x": -3.0}],
    }  # fmt: skip


def test_offsets_are_of_the_text(model):
    """A character of several tokens counts once, wherever the prompt ends."""
    text = " \U0001f600\u00e9\u65e5 the"
    ids = model.tokenize(text[1:], add_special_tokens=False)  # SentencePiece writes the first space
    assert len(ids) > len(text)

    def say(so_far, logits):
        return np.eye(len(logits), dtype=np.float32)[ids[len(so_far) - n_prompt]] * 99

    n_prompt = len(model.tokenize("\u00e9 cat"))
    asked = {"prompt": "\u00e9 cat", "logprobs": 1, "max_tokens": len(ids), "logits_processor": say, **PLAIN}
    wanted = [len(bytes_before.decode("utf-8", "ignore")) for bytes_before in
              (b"".join(map(model.tokenizer.token_bytes, ids[:at])) for at in range(len(ids)))]  # fmt: skip
    whole, echoed = (model.create_completion(**asked, echo=echo)["choices"][0] for echo in (False, True))
    assert whole["text"] == text and whole["logprobs"]["text_offset"] == wanted
    assert echoed["text"] == f"\u00e9 cat{text}"
    assert echoed["logprobs"]["text_offset"][n_prompt:] == [len("\u00e9 cat") + offset for offset in wanted]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in model.create_completion(**asked, stream=True)]
    assert sum((one["text_offset"] for one in chunks if one), []) == wanted


def test_a_chat_completion_is_chat(model):
    wanted = model.chat(MESSAGES, max_tokens=5, logprobs=2, **GREEDY)
    answer = model.create_chat_completion(MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, **PLAIN)
    assert json.loads(json.dumps(answer)) == answer and answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text} and choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [one.logprob for one in wanted.logprobs]
    assert all(bytes(one["bytes"]).decode("utf-8", "replace") == one["token"] for one in content)
    assert [len(one["top_logprobs"]) for one in content] == [2] * 5
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]  # greedy
    assert model.create_chat_completion(MESSAGES, max_completion_tokens=3, **PLAIN)["usage"]["completion_tokens"] == 3
    none = model.create_chat_completion(MESSAGES, max_completion_tokens=0, max_tokens=3, **PLAIN)
    assert none["usage"]["completion_tokens"] == 0 and none["choices"][0]["finish_reason"] == "length"
    several = model.create_chat_completion(MESSAGES, max_tokens=3, n=2, seed=1, temperature=1.0, ignore_eos=True)
    assert several["choices"][1]["message"]["content"] == model.chat(
        MESSAGES, max_tokens=3, seed=2, temperature=1.0, ignore_eos=True
    ).text  # fmt: skip
    assert several["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens


def test_chunks_of_a_chat_completion(model):
    wanted = model.chat(MESSAGES, max_tokens=5, **GREEDY)
    first, *pieces, last = model.create_chat_completion(MESSAGES, max_tokens=5, stream=True, **PLAIN)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == wanted.text
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}


def test_a_stream_that_is_let_go_frees_its_rows(model):
    for _ in range(10):  # 64 rows in all
        chunks = model.create_completion(PROMPT, max_tokens=40, stream=True, **PLAIN)
        next(chunks)
        chunks.close()
    assert model.generate(PROMPT, max_tokens=40, **GREEDY).finish_reason == "length"


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"dimensions"}))
def test_what_slimrt_lacks_is_refused_by_name_and_nothing_of_it_is_fine(model, name):
    nothing, instead = REFUSED[name]
    calls = [(model.create_completion, PROMPT), (model.create_chat_completion, MESSAGES)]
    for create, given in calls[:1] if name in TOOLS else calls:
        with pytest.raises(slimrt.UnsupportedError, match=f"^{create.__name__} does not support {name}={{'some"):
            create(given, **{name: {"some": "thing"}})
        for value in nothing:
            assert create(given, max_tokens=1, **{name: value})["choices"]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"temprature": 1}, TypeError, "create_completion has no temprature .did you mean temperature"),
        ({"repetition_penalty": 1}, TypeError, "here it is called repeat_penalty"),
        ({"n": 0}, ValueError, "n must be at least 1"),
        ({"n": 2, "stream": True}, slimrt.UnsupportedError, "stream=True gives one text, not 2"),
        ({"stream": True, "stream_options": {"usage": 1}}, slimrt.UnsupportedError, "did you mean 'include_usage'"),
        ({"stream_options": {"include_usage": True}}, ValueError, "stream_options goes with stream=True"),
        ({"stream": True, "stream_options": 5}, TypeError, "stream_options maps names to true or false, got 5"),
        ({"echo": True, "logprobs": 1, "stream": True}, slimrt.UnsupportedError, "no echo with logprobs"),
        ({"logprobs": "many"}, TypeError, "logprobs must be a whole number"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"logprobs": -1}, ValueError, "logprobs must not be negative, got -1"),
        ({"stream": "false"}, TypeError, "stream must be true or false, got 'false'"),
        ({"echo": "no"}, TypeError, "echo must be true or false, got 'no'"),
        ({"stream": True, "stream_options": {"include_usage": "no"}}, TypeError, "include_usage must be true or false"),
        ({"mirostat_mode": 1}, slimrt.UnsupportedError, "^mirostat_mode 1 is not supported"),
        ({"mirostat_mode": 3}, ValueError, "^mirostat_mode must be 0 .none. or 2, got 3"),
        ({"mirostat": 3}, ValueError, "^mirostat must be 0 .none. or 2, got 3"),
        ({"mirostat_mode": "2"}, TypeError, "^mirostat_mode must be a whole number"),
    ],
)
def test_wrong_requests_are_told_at_once(model, options, error, said):
    with pytest.raises(error, match=said):
        model.create_completion(PROMPT, **options)


def test_top_logprobs_belong_to_logprobs(model):
    with pytest.raises(ValueError, match="top_logprobs goes with logprobs=True"):
        model.create_chat_completion(MESSAGES, top_logprobs=2)
    with pytest.raises(ValueError, match="top_logprobs must not be negative, got -1"):
        model.create_chat_completion(MESSAGES, logprobs=True, top_logprobs=-1)
    with pytest.raises(TypeError, match="logprobs must be true or false, got 'no'"):
        model.create_chat_completion(MESSAGES, logprobs="no")
    with pytest.raises(TypeError, match=r"^Model.create_chat_completion\(\) missing 1 required"):
        model.create_chat_completion()
    assert not OPTIONS & REFUSED.keys()


def test_biases_may_have_jsons_keys(model):
    token = model.generate(PROMPT, max_tokens=1, **GREEDY).tokens[0]
    plain, barred = (
        model.create_completion(PROMPT, max_tokens=1, logit_bias=bias, **PLAIN)["choices"][0]["text"]
        for bias in ({}, {str(token): -math.inf})
    )
    assert plain != barred


def test_embeddings_are_those_of_embed(model):
    answer = model.create_embedding(["a", "the cat"])
    vectors = model.embed(["a", "the cat"])
    assert json.loads(json.dumps(answer)) == answer and answer["object"] == "list" and answer["model"] == "tiny.gguf"
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert np.array_equal(np.array([one["embedding"] for one in answer["data"]], np.float32), vectors)
    n_tokens = len(model.tokenize("a")) + len(model.tokenize("the cat"))
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    one = model.create_embedding([BOS, 300 - 22], encoding_format="base64", model="mine")["data"]
    assert len(one) == 1 and len(base64.b64decode(one[0]["embedding"])) == 4 * vectors.shape[1]
    with pytest.raises(slimrt.UnsupportedError, match="does not support dimensions=8"):
        model.create_embedding("a", dimensions=8)
    with pytest.raises(slimrt.UnsupportedError, match="encoding_format 'hex'"):
        model.create_embedding("a", encoding_format="hex")
