# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness itself over slimrt, on small tasks from files beside it."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

import slimrt
from conftest import TESTS

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
TALE = TESTS.parent / "models" / "tale-llama.gguf"

DOCS = {
    "choice": [
        {"question": "Anna was a", "choices": [" baker", " q7x#", " stone"], "answer": 0},
        {"question": "Anna was a", "choices": [" zzz", " fisher"], "answer": 1},
        {"question": "Tom went to the", "choices": [" mill", " mill."], "answer": 0},
    ],
    "text": [{"text": "Anna was a baker in a green valley."}, {"text": "Tom went to the mill. " * 12}],
    "answer": [{"question": "Anna was a baker", "wanted": "in"}, {"question": "Tom", "wanted": "x"}],
}
TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "answer",
        "doc_to_choice": "choices", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{wanted}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """lm-eval's results and samples of the three tasks, at a context of 48 tokens, and the model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from slimrt.integrations.lm_eval import SlimrtLM

    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HOME", "HF_DATASETS_CACHE"):
            patch.setenv(name, str(folder / "cache"))
        for name, task in TASKS.items():
            lines = "".join(json.dumps(doc) + "\n" for doc in DOCS[name])
            (folder / f"{name}.jsonl").write_text(lines)
            data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
            whole = {"task": f"slim_{name}", "test_split": "test"} | data | task
            (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
        lm = SlimrtLM(str(TALE), batch_size=2, cache_type="f32", n_ctx=48)
        tasks = [f"slim_{name}" for name in TASKS]
        found = lm_eval.simple_evaluate(
            model=lm, tasks=tasks, task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0, log_samples=True,
        )  # fmt: skip
    yield found, lm
    lm.model.close()


def test_choices_have_the_likelihoods_of_score(evaluated):
    found, lm = evaluated
    for doc, sample in zip(DOCS["choice"], found["samples"]["slim_choice"], strict=True):
        n_context = len(lm.model.tokenize(doc["question"]))
        for choice, ((value, greedy),) in zip(doc["choices"], sample["resps"], strict=True):
            score = lm.model.score(doc["question"] + choice)
            assert value == pytest.approx(float(score.logprobs[n_context - 1 :].sum()), abs=1e-3)
            likeliest = lm.model.logits(score.tokens).argmax(-1)[n_context - 1 : -1]
            assert greedy == np.array_equal(likeliest, score.tokens[n_context:])
    assert found["results"]["slim_choice"]["acc,none"] == pytest.approx(1.0, abs=0.34)
    assert found["samples"]["slim_choice"][0]["acc"] == 1.0


def test_whole_texts_are_scored_in_windows(evaluated):
    found, lm = evaluated
    short, long = (sample["resps"][0][0] for sample in found["samples"]["slim_text"])
    first = lm.model.tokenize(DOCS["text"][0]["text"])
    assert short == pytest.approx(lm.model.score(first).log_likelihood, abs=1e-3)
    bos, *ids = lm.model.tokenize(DOCS["text"][1]["text"])
    n_left = len(ids) - 48  # of the second window, which begins with as many of the first as it has room for
    assert 0 < n_left < 48
    with slimrt.Model(TALE, cache_type="f32") as model:
        one, other = model.score([bos, *ids[:48]]), model.score(ids[-49:])
    wanted = one.log_likelihood + float(other.logprobs[-n_left:].sum())
    assert long == pytest.approx(wanted, abs=1e-3)


def test_answers_are_those_of_generate(evaluated):
    found, lm = evaluated
    for doc, sample in zip(DOCS["answer"], found["samples"]["slim_answer"], strict=True):
        wanted = lm.model.generate(doc["question"], max_tokens=8, temperature=0, stop=[".", "\n"]).text
        assert sample["resps"][0][0] == wanted


def test_lm_eval_finds_the_model_by_its_name():
    from lm_eval.api.registry import get_model

    from slimrt.integrations.lm_eval import SlimrtLM

    assert get_model("slimrt") is SlimrtLM
    with SlimrtLM.create_from_arg_string(f"pretrained={TALE},cache=k+r:q8,n_ctx=32", {"batch_size": 1}).model as model:
        assert model.n_ctx == 32 and model.info()["layers"][0]["mode"] == "k+r"
    with pytest.raises(ValueError, match="batch_size must be a number, got 'auto'"):
        SlimrtLM(str(TALE), batch_size="auto")
    with pytest.raises(TypeError, match="Model has no dtype"):
        SlimrtLM(str(TALE), dtype="float16")


def answer(lm, text, **options):
    """What lm-eval gets for a text, with a task's generation_kwargs."""
    from lm_eval.api.instance import Instance

    request = Instance("generate_until", {}, (text, {"until": ["."], "do_sample": False} | options), 0)
    return lm.generate_until([request])[0]


@pytest.fixture
def log():
    """What is logged below lm-eval's logger, which is all that its command line shows."""
    records, logger = [], logging.getLogger("lm_eval")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_what_does_not_fit_is_cut_and_said_or_refused(evaluated, log):
    _, lm = evaluated
    assert lm._loglikelihood_tokens([(None, [5] * 60, [6, 7])])[0][0] < 0
    assert "a context of 61 tokens was cut to its last 48: n_ctx is 48" in log
    with pytest.raises(slimrt.ContextOverflowError, match="a continuation has 60 tokens"):
        lm._loglikelihood_tokens([(None, [5], [6] * 60)])
    with pytest.raises(slimrt.ContextOverflowError, match=r"up to 48 tokens \(max_gen_toks\), the context holds 48"):
        answer(lm, "Anna was a baker", max_gen_toks=48)  # no room for a prompt: its last token was all that was read


def test_windows_are_scored_n_batch_tokens_at_a_time(monkeypatch):
    from slimrt.integrations.lm_eval import SlimrtLM

    rows, append = [], slimrt.Session.append
    whole, parts = (SlimrtLM(str(TALE), cache_type="f32", n_ctx=48, n_batch=n_batch) for n_batch in (64, 7))
    with whole.model, parts.model:
        prompt = parts.model.tokenize("Anna was a")
        text = parts.model.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)
        likeliest = list(text.tokens)
        requests = [(None, prompt, likeliest), (None, prompt, [*likeliest[:3], 5, *likeliest[4:]])]
        wanted = whole._loglikelihood_tokens(requests)

        def counted(session, ids, **options):
            logits = append(session, ids, **options)
            rows.append(len(logits))
            return logits

        monkeypatch.setattr(slimrt.Session, "append", counted)
        got = parts._loglikelihood_tokens(requests)
    assert max(rows) == 7
    assert [value for value, _ in got] == pytest.approx([value for value, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted] == [True, False]


def test_limits_of_answers_have_all_names_of_lm_eval(evaluated):
    _, lm = evaluated
    texts = [answer(lm, "Anna was a baker", **{name: 3}) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    assert texts == [lm.model.generate("Anna was a baker", max_tokens=3, temperature=0).text] * 3
    assert answer(lm, "Anna was a baker", max_new_tokens=8, max_gen_toks=3) == texts[0]


def test_the_command_runs_where_there_is_no_gpu(log, monkeypatch):
    """lm-eval's command line says cuda:0 where nothing is said."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    from slimrt import core
    from slimrt.integrations.lm_eval import SlimrtLM

    monkeypatch.setattr(core, "cuda_devices", lambda: ([], "no driver"))
    with SlimrtLM(str(TALE), device=EvaluatorConfig().device).model as model:
        assert model.info()["device"].startswith("cpu")
    assert log == ["device cuda:0: no driver; the model is on the CPU"]
    with pytest.raises(slimrt.UnsupportedError):
        SlimrtLM(str(TALE), device="cuda:9")
