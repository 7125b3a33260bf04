# SPDX-License-Identifier: Apache-2.0
"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")  # the extra `serve`
openai = pytest.importorskip("openai")

from served import CHAT, MESSAGES, Served, events, served  # noqa: E402
from slimrt import Model  # noqa: E402
from slimrt.tokenizer.tool_format import tool_format  # noqa: E402

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

GREEDY = {"temperature": 0.0}
HOT = {"temperature": 4.0, "top_p": 1.0, "min_p": 0.0}
PROMPT = "Anna has a red"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), "--parallel", "3") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(CHAT) as loaded:
        yield loaded


class TestChat:
    def test_an_answer_is_the_librarys(self, client: Any, model: Model) -> None:
        wanted = model.create_chat_completion(MESSAGES, **GREEDY)
        got = client.chat.completions.create(model="tale-chat", messages=MESSAGES, **GREEDY)
        assert got.object == "chat.completion" and got.id.startswith("chatcmpl-")
        assert got.choices[0].message.content == wanted["choices"][0]["message"]["content"]
        assert got.choices[0].finish_reason == "stop"
        assert got.usage.prompt_tokens == wanted["usage"]["prompt_tokens"]
        assert got.usage.completion_tokens == wanted["usage"]["completion_tokens"]
        assert got.usage.prompt_tokens_details.cached_tokens is not None

    def test_a_stream_is_the_same_text(self, client: Any, model: Model) -> None:
        wanted = model.create_chat_completion(MESSAGES, **GREEDY)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="x", messages=MESSAGES, **options, **GREEDY))
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == wanted["choices"][0]["message"]["content"]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == wanted["usage"]["total_tokens"]
        assert len({one.id for one in chunks}) == 1

    def test_no_usage_unless_asked_for(self, server: Served) -> None:
        told = events(server.chat(stream=True, max_tokens=3).body)
        assert told[-1] == "[DONE]" and all("usage" not in one for one in told[:-1])

    def test_each_chunk_has_the_usage_so_far_for_who_wants_that(self, server: Served) -> None:
        """As guidellm and vLLM's clients ask."""
        options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
        asked = {"stream": True, "n": 2, "max_tokens": 200, "ignore_eos": True, "stream_options": options}
        *told, last, done = events(server.chat(**asked).body)
        counted = [one["usage"]["completion_tokens"] for one in told]
        assert done == "[DONE]" and counted == sorted(counted) and len({*counted}) > 5
        assert counted[-1] == last["usage"]["completion_tokens"] and last["choices"] == []
        assert {one["usage"]["prompt_tokens"] for one in told} == {last["usage"]["prompt_tokens"]}

    def test_several_answers_have_seeds_of_their_own(self, client: Any, model: Model) -> None:
        wanted = model.create_chat_completion(MESSAGES, n=5, seed=7, max_tokens=12, **HOT)
        asked = {"model": "x", "messages": MESSAGES, "n": 5, "seed": 7, "max_tokens": 12, "extra_body": HOT}
        texts = [one["message"]["content"] for one in wanted["choices"]]
        assert len(set(texts)) > 1
        got = client.chat.completions.create(**asked)
        assert [one.message.content for one in got.choices] == texts
        assert got.usage.completion_tokens == wanted["usage"]["completion_tokens"]
        streamed = [""] * 5
        for chunk in client.chat.completions.create(**asked, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == texts

    def test_logprobs(self, client: Any, model: Model) -> None:
        asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, **GREEDY}
        wanted = model.create_chat_completion(MESSAGES, **asked)["choices"][0]["logprobs"]["content"]
        got = client.chat.completions.create(model="x", messages=MESSAGES, **asked).choices[0].logprobs.content
        assert [one.token for one in got] == [one["token"] for one in wanted]
        assert np.allclose([one.logprob for one in got], [one["logprob"] for one in wanted], atol=1e-4)
        assert [len(one.top_logprobs) for one in got] == [3] * len(wanted)
        chunks = client.chat.completions.create(model="x", messages=MESSAGES, stream=True, **asked)
        streamed = [
            entry.token for one in chunks if one.choices[0].logprobs for entry in one.choices[0].logprobs.content
        ]
        assert streamed == [one["token"] for one in wanted]

    def test_stop_and_limit(self, client: Any) -> None:
        whole = client.chat.completions.create(model="x", messages=MESSAGES, **GREEDY).choices[0].message.content
        stop = whole[len(whole) // 2 :][:3]
        cut = client.chat.completions.create(model="x", messages=MESSAGES, stop=[stop], **GREEDY).choices[0]
        assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"
        short = client.chat.completions.create(model="x", messages=MESSAGES, max_completion_tokens=2, **GREEDY)
        assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2

    def test_what_was_measured_is_told_to_who_asks(self, server: Served) -> None:
        answer = server.ask("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}, x_slimrt="1").json
        assert answer["timings"][0]["ttft"] > 0 and answer["cache"][0]["bytes_per_token"] == 1024
        assert "timings" not in server.chat(max_tokens=3).json

    def test_many_at_once_are_each_as_alone(self, server: Served, model: Model) -> None:
        from concurrent.futures import ThreadPoolExecutor

        asked = [[{"role": "user", "content": text}] for text in ("Hello", "Who are you?", "Tell me a story", "Hi") * 2]
        wanted = [model.create_chat_completion(one, **GREEDY)["choices"][0]["message"]["content"] for one in asked]
        with ThreadPoolExecutor(8) as threads:
            got = list(threads.map(lambda one: server.chat(messages=one, **GREEDY).json, asked))
        assert [one["choices"][0]["message"]["content"] for one in got] == wanted

    def test_what_two_texts_begin_with_is_computed_once(self, server: Served) -> None:
        said = [{"role": "user", "content": "Tell me of a red fox who lives in the woods by the old mill. " * 3}]
        first, again = (server.chat(messages=said, **GREEDY).json for _ in range(2))
        fresh = server.chat(messages=said, cache_prompt=False, **GREEDY).json
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= again["usage"]["prompt_tokens"] - 32
        assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert first["choices"][0]["message"] == again["choices"][0]["message"] == fresh["choices"][0]["message"]


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


class TestStructure:
    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def grammars() -> None:
        pytest.importorskip("llguidance")  # the extra `grammar`

    def test_schemas(self, client: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        got = client.chat.completions.create(model="x", messages=MESSAGES, response_format=form, n=3, extra_body=HOT)
        assert all(json.loads(one.message.content)["n"] in (1, 2) for one in got.choices)

    def test_calls_of_tools(self, client: Any) -> None:
        asked = {"model": "x", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", **GREEDY}
        (call,) = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "count" and json.loads(call.function.arguments)["n"] in (1, 2)
        chunks = [one.choices[0] for one in client.chat.completions.create(**asked, stream=True)]
        told = [piece for one in chunks for piece in one.delta.tool_calls or () if piece.index == 0]
        assert told[0].id.startswith("call_") and told[0].function.name == "count"
        assert json.loads("".join(piece.function.arguments or "" for piece in told)) in ({"n": 1}, {"n": 2})
        assert chunks[-1].finish_reason == "tool_calls"

    def test_a_function_without_parameters_has_no_arguments(self, server: Served) -> None:
        for more in ({}, {"parameters": None}):
            now = {"type": "function", "function": {"name": "now", **more}}
            asked = {"tools": [now], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
            for seed in range(4):
                choice = server.chat(**asked, **HOT, seed=seed).json["choices"][0]
                assert choice["finish_reason"] == "tool_calls"
                assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}

    def test_what_cannot_be_enforced_is_named(self, server: Served) -> None:
        schema = {"type": "object", "not": {"required": ["a"]}}
        for path, more in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "a"})):
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            answer = server.ask(f"/v1/{path}", {**more, "response_format": form})
            assert answer.status == 400 and "not" in answer.error["message"], answer.body
        assert server.chat(tools=[{"type": "function"}]).status == 400
        assert server.chat(tool_choice="required").error["param"] == "tool_choice"
        assert server.chat(tools=[TOOL] * 129).error["param"] == "tools"
        assert server.chat(grammar="/etc/passwd").status == 400


def test_beginnings_outlive_the_server(tmp_path: Any) -> None:
    flags, said = ("--prefix-dir", str(tmp_path / "kept")), {"prompt": "the red fox " * 40, "max_tokens": 2}
    cached = []
    for _ in range(2):
        with served(tmp_path, *flags) as server:
            answer = server.ask("/v1/completions", said).json
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert server.terminate() == 0, server.log.read_text()
    assert cached[0] == 0 and cached[1] >= answer["usage"]["prompt_tokens"] - 64


class TestCompletions:
    def test_texts_and_ids_one_or_several(self, client: Any, model: Model) -> None:
        ids = model.tokenize(PROMPT)
        wanted = model.create_completion(PROMPT, max_tokens=8, **GREEDY)["choices"][0]["text"]
        for prompt, count in ((PROMPT, 1), (ids, 1), ([PROMPT, PROMPT], 2), ([ids, ids, ids], 3)):
            got = client.completions.create(model="x", prompt=prompt, max_tokens=8, **GREEDY)
            assert [one.text for one in got.choices] == [wanted] * count
            assert [one.index for one in got.choices] == list(range(count))
            assert got.usage.prompt_tokens == len(ids) * count

    def test_sixteen_tokens_unless_said(self, client: Any) -> None:
        got = client.completions.create(model="x", prompt=PROMPT, extra_body={"ignore_eos": True})
        assert got.usage.completion_tokens == 16 and got.choices[0].finish_reason == "length"

    def test_n_of_several_prompts(self, client: Any, model: Model) -> None:
        asked = {"prompt": [PROMPT, "Hello"], "n": 2, "seed": 3, "max_tokens": 5, "temperature": 1.2}
        wanted = [one["text"] for one in model.create_completion(**asked)["choices"]]
        assert [one.text for one in client.completions.create(model="x", **asked).choices] == wanted

    @pytest.mark.parametrize("max_tokens", [0, 4])
    def test_echo_with_logprobs(self, client: Any, model: Model, max_tokens: int) -> None:
        asked = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens, **GREEDY}
        wanted = model.create_completion(**asked)["choices"][0]
        got = client.completions.create(model="x", **asked).choices[0]
        assert got.text == wanted["text"] and got.text.startswith(PROMPT)
        assert got.logprobs.tokens == wanted["logprobs"]["tokens"]
        assert got.logprobs.text_offset == wanted["logprobs"]["text_offset"]
        assert got.logprobs.token_logprobs[0] is None
        assert np.allclose(got.logprobs.token_logprobs[1:], wanted["logprobs"]["token_logprobs"][1:], atol=1e-4)

    @pytest.mark.parametrize("prompt", [PROMPT, ""])  # of the second BOS alone
    def test_a_stream_echoes_too(self, client: Any, model: Model, prompt: str) -> None:
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 6, **GREEDY}
        wanted = model.create_completion(**asked)["choices"][0]
        chunks = [one.choices[0] for one in client.completions.create(model="x", stream=True, **asked)]
        assert "".join(one.text for one in chunks) == wanted["text"]
        tokens = [token for one in chunks if one.logprobs for token in one.logprobs.tokens]
        offsets = [offset for one in chunks if one.logprobs for offset in one.logprobs.text_offset]
        assert tokens == wanted["logprobs"]["tokens"] and offsets == wanted["logprobs"]["text_offset"]


class TestOthers:
    def test_embeddings(self, client: Any, model: Model) -> None:
        texts = ["a cat", "a dog", "the sea"]
        wanted = model.embed(texts)
        got = client.embeddings.create(model="x", input=texts)  # as base64
        assert np.allclose([one.embedding for one in got.data], wanted, atol=1e-3)
        floats = client.embeddings.create(model="x", input=texts[0], encoding_format="float")
        assert np.allclose(floats.data[0].embedding, wanted[0], atol=1e-3)
        assert got.usage.prompt_tokens == sum(len(model.tokenize(one)) for one in texts)

    def test_embeddings_are_float32_in_base64(self, server: Served, model: Model) -> None:
        got = server.ask("/v1/embeddings", {"input": "a cat", "encoding_format": "base64"}).json["data"][0]["embedding"]
        assert np.allclose(np.frombuffer(base64.b64decode(got), "<f4"), model.embed("a cat"), atol=1e-3)

    def test_models(self, client: Any) -> None:
        (listed,) = client.models.list().data
        assert client.models.retrieve(listed.id).id == listed.id == CHAT.name
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-5")
        assert caught.value.code == "model_not_found"

    def test_tokens_and_templates(self, server: Served, model: Model) -> None:
        ids = server.ask("/tokenize", {"content": PROMPT}).json["tokens"]
        assert ids == model.tokenize(PROMPT, add_special_tokens=False)
        assert server.ask("/detokenize", {"tokens": ids}).json == {"content": PROMPT}
        prompt = server.ask("/apply-template", {"messages": MESSAGES}).json["prompt"]
        assert model.tokenize(prompt) == model.render_chat(MESSAGES)

    def test_properties_and_counts(self, server: Served, model: Model) -> None:
        props = server.ask("/props").json
        assert (props["n_ctx"], props["parallel"], props["cache"]) == (1024, 3, "kv f16")
        assert props["chats"] and props["tools"] == tool_format(model.tokenizer).origin
        before = server.metric('tokens_total{kind="generated"}')
        server.chat(max_tokens=4, ignore_eos=True)
        assert server.metric('tokens_total{kind="generated"}') == before + 4
        assert server.metric("time_to_first_token_seconds_count") > 0

    def test_masks_and_guesses_are_counted(self, server: Served) -> None:
        made = server.metric("masks")
        assert json.loads(server.chat(response_format={"type": "json_object"}, max_tokens=40).body)
        assert server.metric("masks") > made and 0 < server.metric("mask_seconds_mean") < 1
        assert server.metric("mask_wait_seconds") >= 0
        words = "one two three one two three one two three one two"
        for _ in range(20):  # whether a guess pays is for the clock to say
            server.ask("/v1/completions", {"prompt": words, "lookup": True, "max_tokens": 40, "temperature": 0})
            if guessed := server.metric('drafts_total{kind="drafted"}'):
                break
        assert 0 <= server.metric('drafts_total{kind="accepted"}') <= guessed > 0

    def test_every_answer_has_an_id(self, server: Served) -> None:
        assert server.ask("/health", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
        assert len(server.ask("/health", x_request_id="no good").headers["x-request-id"]) == 32
        assert server.ask("/nowhere", x_request_id="mine-2").headers["x-request-id"] == "mine-2"


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param", "code", "words"),
        [
            ({"messages": []}, "messages", "invalid_value", "1 to"),
            ({"messages": None}, "messages", "invalid_value", "needs messages"),
            ({"messages": [{"role": "user"}]}, "messages", "invalid_value", "messages[0]"),
            ({"n": 0}, "n", "invalid_value", "from 1"),
            ({"n": True}, "n", "invalid_value", "whole number"),
            ({"temperature": "warm"}, "temperature", "invalid_value", "number"),
            ({"temperature": True}, "temperature", "invalid_value", "must be a number"),
            ({"seed": False}, "seed", "invalid_value", "must be a number"),
            ({"temperature": 10**400}, "temperature", "invalid_value", "a float holds"),
            ({"logit_bias": {"5": 10**400}}, "logit_bias", "invalid_value", "a float holds"),
            ({"tools": [{"type": "custom"}]}, "tools", "invalid_value", "a tool is"),
            ({"tools": [{"function": {"name": "a", "parameters": "x"}}]}, "tools", "invalid_value", "a JSON schema"),
            ({"max_tokens": -2}, "max_tokens", "invalid_value", "max_tokens"),
            ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "20"),
            ({"temprature": 1}, "temprature", "unknown_field", "did you mean temperature"),
            ({"max_new_tokens": 1}, "max_new_tokens", "unknown_field", "max_tokens"),
            ({"foo": 1}, "foo", "unknown_field", "it has cache_prompt, chat_template_kwargs"),
            ({"logits_processor": "os.system"}, "logits_processor", "unknown_field", "has no logits_processor"),
            ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "token ids"),
            ({"logit_bias": {"900": 1}}, "logit_bias", "invalid_value", "900"),
            ({"stream_options": {"x": 1}}, "stream_options", "invalid_value", "include_usage"),
            ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "goes with stream: true"),
            ({"audio": {"voice": "x"}}, "audio", "unsupported", "texts"),
        ],
    )
    def test_named(self, server: Served, fields: dict[str, Any], param: str, code: str, words: str) -> None:
        answer = server.chat(**fields)
        assert answer.status == 400 and set(answer.error) == {"message", "type", "param", "code"}
        assert (answer.error["param"], answer.error["code"]) == (param, code), answer.error
        assert words in answer.error["message"] and answer.error["type"] == "invalid_request_error"

    def test_what_asks_for_nothing_is_taken(self, client: Any) -> None:
        got = client.chat.completions.create(
            model="gpt-4o", messages=MESSAGES, max_tokens=1, user="me", store=False, metadata={"a": "b"},
            service_tier="auto", tool_choice="none", response_format={"type": "text"}, logit_bias=None,
        )  # fmt: skip
        assert got.model == CHAT.name

    def test_too_long_a_prompt(self, client: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "word " * 2000}])
        assert caught.value.code == "context_length_exceeded" and "1024" in str(caught.value)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="x", prompt=[5] * 1025)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"

    def test_routes_and_bodies_that_are_none(self, server: Served) -> None:
        assert server.ask("/v1/nothing", {}).error["code"] == "no_route"
        for path in ("/completion", "/completions"):  # llama-server's
            assert "did you mean /v1/completions?" in server.ask(path, {"prompt": "a"}).error["message"]
        wrong = server.ask("/v1/chat/completions")
        assert wrong.status == 405 and "is no route here (it takes POST)" in wrong.error["message"]
        for body in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}'):
            assert server.ask("/v1/completions", body).error["code"] == "invalid_json"
        assert server.ask("/v1/embeddings", {"input": "a", "dimensions": 3}).error["param"] == "dimensions"
        assert server.ask("/v1/completions", {"prompt": [5, "a"]}).status == 400
        assert server.ask("/v1/completions", {"prompt": [900]}).status == 400
        assert server.ask("/detokenize", {"tokens": [-1]}).status == 400


PAGE = """
const elements = {}, sent = [];
const element = () => ({ textContent: "", value: "", append() {}, scrollIntoView() {} });
globalThis.document = { getElementById: id => elements[id] ??= element(), createElement: element };
const first = `data: {"choices": [{"delta": {"content": "The sea is"}}]}\\n\\n`;
globalThis.fetch = async (path, { body, signal } = {}) => {
  if (path === "/props") return { json: async () => ({ error: { message: "" } }) };
  sent.push(JSON.parse(body).messages);
  const stream = new ReadableStream({ start(to) {
    to.enqueue(new TextEncoder().encode(first));
    signal.addEventListener("abort", () => to.error(signal.reason));
  } });
  return { ok: true, body: stream };
};
SCRIPT
const type = text => { elements.text.value = text; return elements.ask.onsubmit({ preventDefault() {} }); };
(async () => {
  for (const text of ["Tell me of the sea", "Shorter"]) {
    const asked = type(text);
    await new Promise(done => setTimeout(done, 200));
    elements.stop.onclick();
    await asked;
  }
  console.log(JSON.stringify(sent));
})();
"""


class TestPage:
    def test_runs_what_is_its_own_alone(self, server: Served) -> None:
        answer = server.ask("/")
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'sha256-" in policy
        text = answer.body.decode()
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text

    def test_a_browser_shows_the_model(self, server: Served, tmp_path: Any) -> None:
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if browser is None:
            pytest.skip("no browser is on PATH")
        words = [browser, "--headless", "--disable-gpu", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path}"]
        words += ["--no-sandbox"] if os.getuid() == 0 else []
        shown = subprocess.run([*words, "--dump-dom", server.url], capture_output=True, text=True, timeout=60)
        assert "tale-chat.gguf (llama), context 1024 x 3, cache kv f16" in shown.stdout, shown.stderr

    @pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
    def test_an_answer_stopped_on_the_page_is_part_of_the_conversation(self, server: Served) -> None:
        script = re.search("<script>(.*?)</script>", server.ask("/").body.decode(), re.DOTALL)
        assert script is not None
        run = subprocess.run(
            ["node", "-e", PAGE.replace("SCRIPT", script[1])], capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stderr
        asked = {"role": "user", "content": "Tell me of the sea"}
        said = {"role": "assistant", "content": "The sea is"}
        assert json.loads(run.stdout) == [[asked], [asked, said, {"role": "user", "content": "Shorter"}]]
