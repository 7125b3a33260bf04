# SPDX-License-Identifier: Apache-2.0
"""The reference models this project trains and ships: their goldens, retrieval from the context, k against kv."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import rms
from reference import Reference
from slimrt.folding.precision import measure_error_of_v

pytestmark = pytest.mark.unsanitized  # quality, which takes long there; the core is tested by others

SHIPPED = Path(__file__).parent.parent / "models"
NAMES = ["tale-gpt2", "tale-gqa", "tale-hard", "tale-llama", "tale-neox"]

each_model = pytest.mark.parametrize("name", NAMES)
# Those whose V can be had from K.
each_foldable = pytest.mark.parametrize("name", [name for name in NAMES if name != "tale-gqa"])


def golden(name: str) -> dict:
    return json.loads((SHIPPED / f"{name}.golden.json").read_text(encoding="utf-8"))


# Models that were trained to answer the prompts of retrieval.json.
LONG = ["tale-hard", "tale-llama"]


def load(name: str, mode: str = "kv", cache_type: str = "f32", **options) -> slimrt.Model:
    return slimrt.Model(SHIPPED / f"{name}.gguf", cache=mode, cache_type=cache_type, **options)


def continued(model: slimrt.Model, ids: list[int], n: int) -> list[int]:
    """The n likeliest tokens after ids, one at a time, past the end of a text."""
    with model.session() as session:
        fresh, out = ids, []
        while len(out) < n:
            fresh = [int(session.append(fresh, last_only=True)[-1].argmax())]
            out += fresh
        return out


@each_model
def test_prompts(name):
    """Ids, the likeliest tokens and their logits, and the text that follows."""
    with load(name) as model:
        for row in golden(name)["prompts"]:
            assert model.tokenize(row["prompt"]) == row["ids"]
            last = model.logits(row["ids"])[-1].astype(np.float64)
            size = np.abs(last).max()
            assert np.abs(last[row["top5_ids"]] - row["top5_logits"]).max() < 1e-4 * size
            assert abs(last.max() + np.log(np.exp(last - last.max()).sum()) - row["log_sum_exp"]) < 1e-4 * size
            if "last_logits" in row:
                assert np.abs(last - row["last_logits"]).max() < 1e-4 * size
            if "greedy_ids" in row:
                assert continued(model, row["ids"], len(row["greedy_ids"])) == row["greedy_ids"]


@each_model
def test_perplexity(name):
    """Of the held-out text, in windows that each open with BOS."""
    wanted = golden(name)["heldout"]
    with load(name) as model:
        bos, *ids = model.tokenize((SHIPPED / "heldout.txt").read_text(encoding="utf-8"))
        total, step = 0.0, wanted["window"] - 1
        for start in range(0, len(ids), step):
            part = np.array([bos, *ids[start : start + step]])
            logits = model.logits(part[:-1]).astype(np.float64)
            best = logits.max(axis=1)
            total += (best + np.log(np.exp(logits - best[:, None]).sum(axis=1))).sum()
            total -= logits[np.arange(len(part) - 1), part[1:]].sum()
    assert len(ids) == wanted["tokens"]
    assert abs(total / len(ids) - wanted["nll_per_token"]) < 1e-4


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@each_model
def test_200_greedy_tokens_in_kv(name, cache_type):
    wanted = golden(name)["greedy_200"]
    with load(name, "kv", cache_type) as model:
        n = min(200, model.n_ctx - len(wanted["ids"]))  # the golden window slides at the end of a short context
        assert continued(model, wanted["ids"], n) == wanted["greedy_ids"][:n]


@each_foldable
def test_200_greedy_tokens_in_k_are_those_in_kv(name):
    """K-only in float32 writes the same text: a trained model, an exact identity."""
    wanted = golden(name)["greedy_200"]
    with load(name, "k") as k, load(name, "kv") as kv:
        assert k.memory()["cache_bytes_per_token"] * 2 == kv.memory()["cache_bytes_per_token"]
        n = min(200, k.n_ctx - len(wanted["ids"]))
        assert continued(k, wanted["ids"], n) == wanted["greedy_ids"][:n]


@each_foldable
def test_converted_for_k(name, tmp_path):
    """The folded file writes the same text, and its report predicts, from one text, the error of V that another has."""
    out = tmp_path / "k.gguf"
    options = {"cache": "k", "calibration": SHIPPED / "calibration.txt", "allow_lossy": True}  # f32 rows are read below
    report = slimrt.convert(SHIPPED / f"{name}.gguf", out, **options)
    wanted = golden(name)["greedy_200"]
    with slimrt.Model(out, cache_type="f32") as model:
        assert model.info()["layers"][0]["mode"] == "k"
        n = min(200, model.n_ctx - len(wanted["ids"]))
        assert continued(model, wanted["ids"], n) == wanted["greedy_ids"][:n]
        ids = model.tokenize((SHIPPED / "heldout.txt").read_text(encoding="utf-8"))[: min(1024, model.n_ctx)]
    measured = measure_error_of_v(SHIPPED / f"{name}.gguf", np.array(ids, np.int32), "k")
    for layer in report.layers:
        for type_name in ("f16", "bf16"):
            ratio = layer.errors[type_name] / measured[type_name][layer.layer]
            assert 0.5 < ratio < 2, (layer.layer, type_name, layer.errors[type_name], measured[type_name])
    assert "do not use" in report.table()  # bfloat16 K alone is beyond saving on both models


@each_foldable
def test_k_errs_as_much_as_the_reference_predicts(name):
    """Float16 rows, on text, against rounding in the reference (see test_cache_modes.py)."""
    path = SHIPPED / f"{name}.gguf"
    with load(name, "k", "f16", n_ctx=128, allow_lossy=True) as model, model.session() as session:
        ids = np.array(golden(name)["greedy_200"]["greedy_ids"][:72])
        got = np.concatenate([session.append(ids[:48])] + [session.append(ids[i : i + 1]) for i in range(48, 72)])
    reference = Reference(path, wkv_dtype="f32")
    exact, predicted = reference.logits(ids), reference.logits_cached(ids, 48, "k", "f16")
    assert rms(got - exact) < 1.5 * rms(predicted - exact) + 1e-5 * rms(exact)


# Mean KL divergence, nats a token, of decoding text with rows of a type from decoding it with float32 rows, at most.
# 1e-3 would be seen by nobody; the coarser types are held to about twice what they were when they were made.
DIVERGENCE = {"f16": 1e-5, "bf16": 1e-4, "q8": 2e-4, "fp8_e4m3": 1e-2, "fp8_e5m2": 2e-2, "q4": 3e-2}


def decoded(name: str, cache_type: str, ids: list[int]) -> np.ndarray:
    """Log-probabilities after every token, fed one at a time."""
    with load(name, "kv", cache_type, n_ctx=len(ids)) as model, model.session() as session:
        logits = np.concatenate([session.append([token]) for token in ids]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("tale-llama", "tale-neox"))) for name in NAMES]
)
def test_divergence_of_cache_types(name):
    with load(name) as model:
        ids = model.tokenize((SHIPPED / "heldout.txt").read_text(encoding="utf-8"))[: min(1024, model.n_ctx)]
    exact = decoded(name, "f32", ids)
    for cache_type, most in DIVERGENCE.items():
        divergence = float((np.exp(exact) * (exact - decoded(name, cache_type, ids))).sum(axis=1).mean())
        print(f"{name}, {len(ids)} tokens, kv {cache_type}: {divergence:.1e}")
        assert divergence < most, (cache_type, divergence)


@pytest.mark.parametrize("name", ["tale-llama"])
def test_sparse_threshold(name):
    """A small budget changes little and skips much; none at all changes no bit. What was skipped is reported."""
    with load(name) as model:
        text = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")
        ids = model.tokenize(text)[:1000]
        wanted = model.generate(ids, max_tokens=20, temperature=0, ignore_eos=True)
    assert wanted.cache.skipped == 0
    logits = {}
    for threshold in (0.0, 1e-3, 1e-2):
        with load(name, sparse_threshold=threshold) as model:
            got = model.generate(ids, max_tokens=20, temperature=0, ignore_eos=True)
            with model.session() as session:
                session.append(ids)
                logits[threshold] = session.append([5])[0].astype(np.float64)
        print(f"{name}: sparse_threshold {threshold}: {got.cache.skipped:.1%} of V not read")
        assert got.tokens == wanted.tokens or threshold == 1e-2
        assert got.cache.skipped >= {0.0: 0.0, 1e-3: 0.5, 1e-2: 0.7}[threshold]
    assert np.abs(logits[1e-3] - logits[0.0]).max() < 0.05 * np.abs(logits[0.0]).max()


@pytest.mark.parametrize(
    ("mode", "cache_type"), [("kv", "f32"), pytest.param("kv", "f16", marks=pytest.mark.nightly), ("k", "f32")]
)
@pytest.mark.parametrize("name", LONG)
def test_retrieval(name, mode, cache_type):
    """A fact stated up to 1000 tokens before its question is found through the cache, wherever it stands."""
    prompts = json.loads((SHIPPED / "retrieval.json").read_text(encoding="utf-8"))["prompts"]
    with load(name, mode, cache_type) as model:
        right = 0
        for row in prompts:
            assert model.tokenize(row["prompt"]) == row["prompt_ids"] and len(row["prompt_ids"]) >= 1000
            right += continued(model, row["prompt_ids"], len(row["answer_ids"])) == row["answer_ids"]
    assert golden(name)["retrieval"][0]["accuracy"] >= 0.99 and right >= 0.99 * len(prompts)


@pytest.mark.parametrize(("mode", "cache_type"), [("kv", "f32"), ("kv", "f16"), ("k", "f32")])
def test_copy(mode, cache_type):
    """A list of 30 words is said again up to 1000 tokens later, among lists of the same words in other orders."""
    prompts = json.loads((SHIPPED / "copy.json").read_text(encoding="utf-8"))["prompts"]
    with load("tale-hard", mode, cache_type) as model:
        right = 0
        for row in prompts:
            assert model.tokenize(row["prompt"]) == row["prompt_ids"] and len(row["prompt_ids"]) >= 1000
            right += continued(model, row["prompt_ids"], len(row["answer_ids"])) == row["answer_ids"]
    assert right >= (golden("tale-hard")["copy"][0]["accuracy"] - 0.05) * len(prompts)


def test_tale_hard_is_hard():
    """Its W_K is what it was trained for: V from a float16 K is at least 10 % wrong in most layers."""
    with load("tale-llama") as model:
        ids = np.array(model.tokenize((SHIPPED / "heldout.txt").read_text(encoding="utf-8"))[:1024], np.int32)
    hard, easy = (measure_error_of_v(SHIPPED / f"{name}.gguf", ids)["f16"] for name in ("tale-hard", "tale-llama"))
    assert (hard > 3 * easy).all() and np.median(hard) > 0.1, (hard, easy)


def test_gqa_refuses_k():
    with pytest.raises(slimrt.CacheUnsupportedError, match="2 KV heads, 4 query heads"):
        load("tale-gqa", "k")


@pytest.mark.parametrize(("mode", "cache_type"), [("kv", "f32"), ("k", "f32"), ("kv", "q8"), ("k+r", "q8")])
def test_tale_chat_answers(mode, cache_type):
    """The recorded conversations, turn by turn: ids of the prompts, the likeliest tokens, the answers."""
    recorded = json.loads((SHIPPED / "tale-chat.json").read_text(encoding="utf-8"))["conversations"]
    assert sum(len(one["turns"]) for one in recorded) >= 12
    with load("tale-chat", mode, cache_type) as model:
        for conversation in recorded:
            asked = [i for i, message in enumerate(conversation["messages"]) if message["role"] == "user"]
            for end, turn in zip(asked, conversation["turns"], strict=True):
                ids = model.render_chat(conversation["messages"][: end + 1])
                assert ids == turn["ids"]
                last = model.logits(ids)[-1].astype(np.float64)
                if cache_type == "f32":
                    assert np.abs(last[turn["top5_ids"]] - turn["top5_logits"]).max() < 1e-4 * np.abs(last).max()
                assert model.generate(ids, max_tokens=40, temperature=0).text == turn["answer"]


def test_tale_chat_adds_and_remembers(run):
    """What README shows, and a name."""
    path = SHIPPED / "tale-chat.gguf"
    assert run("chat", path, "-p", "What is 2 + 3?", "--temp", 0) == (0, "2 + 3 is 5.\n", "")
    assert run("chat", path, "-p", "What is 2 + 3?", "--temp", 0, "-sys", "Be brief.")[1] == "5\n"
    messages = [{"role": "user", "content": "My name is Ruth."}]
    with slimrt.Model(path) as model:
        messages.append({"role": "assistant", "content": model.chat(messages, temperature=0).text})
        messages.append({"role": "user", "content": "What is my name?"})
        assert model.chat(messages, temperature=0).text == "Your name is Ruth."


@pytest.mark.parametrize("name", [*NAMES, "tale-chat"])
def test_files_are_small_and_complete(name):
    """What ships with the project stays small, and carries its licence and tokenizer."""
    path = SHIPPED / f"{name}.gguf"
    file = slimrt._core.GgufFile(str(path))
    assert path.stat().st_size < 16 << 20
    assert (file.value("general.name"), file.value("general.license")) == (name, "Apache-2.0")
    assert len(file.value("tokenizer.ggml.tokens")) == file.tensors()["token_embd.weight"][1][0]
