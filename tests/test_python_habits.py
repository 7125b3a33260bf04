# SPDX-License-Identifier: Apache-2.0
"""What Python's users bring with them: names of options, print(), logging, pickle, type checkers."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GREEDY, PROMPT, TESTS
from slimrt.folding.report import ConvertReport, LayerReport
from slimrt.plumbing import notes
from slimrt.plumbing.keywords import ADVICE, ELSEWHERE
from slimrt.results import CacheComparison, CacheQuality
from slimrt.speech.records import Segment, TranscriptionInfo
from tiny_model import BOS

SHIPPED = TESTS.parent / "models"


def calls(model):
    """Each call of a model with one positional argument that it takes or that does not matter."""
    return {
        "generate": lambda **given: model.generate(PROMPT, **given),
        "stream": lambda **given: model.stream(PROMPT, **given),
        "agenerate": lambda **given: asyncio.run(model.agenerate(PROMPT, **given)),
        "astream": lambda **given: model.astream(PROMPT, **given),
        "chat": lambda **given: model.chat([], **given),
        "text2text": lambda **given: model.text2text(PROMPT, **given),
        "translate": lambda **given: model.translate(PROMPT, **given),
        "transcribe": lambda **given: model.transcribe(np.zeros(16000), **given),
        "predict_quantiles": lambda **given: model.predict_quantiles([1.0], **given),
        "tokenize": lambda **given: model.tokenize(PROMPT, **given),
        "detokenize": lambda **given: model.detokenize([5], **given),
        "perplexity": lambda **given: model.perplexity(PROMPT, **given),
        "plan": lambda **given: slimrt.plan("x.gguf", **given),
        "compare_caches": lambda **given: slimrt.compare_caches("x.gguf", "text", ["kv"], **given),
        "Model": lambda **given: slimrt.Model("x.gguf", **given),
    }


@pytest.mark.parametrize(
    ("call", "theirs", "said"),
    [
        ("generate", "temp", "generate has no temp: here it is called temperature"),
        ("generate", "max_new_tokens", "here it is called max_tokens"),
        (
            "generate",
            "temprature",
            "generate has no temprature (did you mean temperature?); it has ",
        ),
        ("generate", "stream", "generate has no stream: stream() yields"),
        ("generate", "beam_size", "here it is called num_beams"),
        ("stream", "repetition_penalty", "stream has no repetition_penalty: here it is called repeat_penalty"),
        ("agenerate", "stop_strings", "agenerate has no stop_strings: here it is called stop"),
        ("astream", "temp", "astream has no temp"),
        ("chat", "tools", "chat has no tools: "),
        ("text2text", "beam_size", "text2text has no beam_size: here it is called num_beams"),
        ("translate", "tgt_lang", "translate has no tgt_lang: here it is called target"),
        ("transcribe", "vad_filter", "transcribe has no vad_filter: here it is called vad"),
        ("transcribe", "temp", "here it is called temperature"),
        ("predict_quantiles", "horizon", "predict_quantiles has no horizon: here it is called prediction_length"),
        ("tokenize", "special", "tokenize has no special: here it is called parse_special"),
        ("detokenize", "special", "here it is called skip_special_tokens"),
        ("perplexity", "strides", "did you mean stride"),
        ("plan", "context_length", "plan has no context_length: here it is called n_ctx"),
        ("compare_caches", "windows", "compare_caches has no windows (did you mean window?)"),
        ("Model", "context_length", "Model has no context_length: here it is called n_ctx"),
        ("compare_caches", "n_gpu_layers", "compare_caches has no n_gpu_layers: here it is called device"),
        ("Model", "cachetype", "did you mean cache_type"),
    ],
)
def test_an_option_that_a_call_lacks_is_told_its_name_here(model, call, theirs, said):
    with pytest.raises(TypeError) as error:
        calls(model)[call](**{theirs: 1})
    assert said in str(error.value) and "__init__" not in str(error.value)


def test_every_name_in_the_table_is_one_of_some_call():
    known = set()
    for name, call in inspect.getmembers(slimrt.Model, inspect.isfunction):
        if hasattr(call, "__wrapped__"):
            known |= set(_parameters(call))
            assert call.__qualname__ == f"Model.{name}"
    for theirs, ours in ELSEWHERE.items():
        assert all(one.split(",")[0].split()[0] in known for one in ours), theirs
    assert not ELSEWHERE.keys() & ADVICE.keys()


def _parameters(call):
    from slimrt.plumbing.keywords import _names

    return _names(call.__wrapped__)


def test_pythons_own_errors_name_no_class_behind_model(model):
    for call in (model.transcribe, model.text2text, model.predict_quantiles):
        with pytest.raises(TypeError, match=f"^Model.{call.__name__}\\(\\) missing 1 required"):
            call()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (("a", "b"), "got tuple: several texts are given as a list"),
        (None, "a text is str, or its token ids, got NoneType"),
        (b"abc", "got bytes: decode.. bytes first"),
        ([None], "got NoneType"),
        ([b"abc"], "got bytes"),
        (np.array(["a", "b"]), "got ndarray: several texts"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(model, prompt, said):
    for call in (model.generate, model.stream, model.score) if not isinstance(prompt, list) else (model.generate,):
        with pytest.raises(TypeError, match=said):
            call(prompt)


def test_a_text_where_ids_are_wanted_is_refused_in_words(model):
    with model.session() as session:
        for call in (model.logits, session.append):
            with pytest.raises(TypeError, match="token ids are wanted here, got a text: tokenize.. it first: 'Anna'"):
                call("Anna")


def test_numbers_of_numpy_are_numbers(tiny, calibration, tmp_path):
    """As arguments, and in what is written to JSON."""
    n, folds = np.int64, {"calibration": calibration}
    sizes = {"n_ctx": n(64), "n_seqs": n(2), "n_batch": n(32), "n_threads": n(1), "cache_tokens": n(128)}
    cache = {"cache": "k+r", "rank": n(16), "sparse_threshold": np.float32(0.01), "memory_limit": n(10**9)}
    with slimrt.Model(tiny, **sizes, **cache, **folds, seed=n(3)) as model:
        several = model.generate("Anna", max_tokens=n(3), seed=n(5), top_k=n(3), temperature=np.float32(0.5), n=n(2))
        assert [one.seed for one in several] == [5, 6]
        found = [model.info(), model.memory(), *(one.to_dict() for one in several)]
    found += [slimrt.plan(tiny, **sizes, **cache).to_dict()]
    for asked in (
        {"cache": "k+r", "rank": n(16)} | folds,
        {"cache": "auto", "target_error": np.float32(0.05)} | folds,
        {"cache": "auto", "target_bytes": n(300)} | folds,
        {"kv_heads": n(1), "kv_layers": n(1)},
    ):
        found += [slimrt.convert(tiny, tmp_path / "c.gguf", **asked).to_dict()]
    assert all(json.loads(json.dumps(one)) for one in found)


def test_arguments_of_a_wrong_type_are_named(tmp_path):
    with pytest.raises(TypeError, match="target_error must be a number, got '1%'"):
        slimrt.convert(SHIPPED / "tale-llama.gguf", tmp_path / "a.gguf", cache="auto", target_error="1%")
    with pytest.raises(TypeError, match=r"caches are a list, such as .*, got 'kv:q8'"):  # not the modes k, v, :, ...
        slimrt.compare_caches(SHIPPED / "tale-llama.gguf", "Anna was a baker. " * 60, "kv:q8")


def test_a_switch_is_true_or_false(model, tmp_path):
    """A text was taken for true: overwrite="no" replaced a file."""
    text = tmp_path / "mine.gguf"
    text.write_text("mine")
    with model.session() as session:
        for name, call in (
            ("normalize", model.embed),
            ("add_special_tokens", model.tokenize),
            ("skip_special_tokens", model.detokenize),
            ("verbose", slimrt.Model),
            ("progress", slimrt.Model),
            ("overwrite", lambda path, **given: slimrt.convert(path, text, **given)),
            ("overwrite", lambda _, **given: session.save(text, **given)),
            ("last_only", lambda _, **given: session.append([BOS], **given)),
        ):
            with pytest.raises(TypeError, match=f"^{name} must be true or false, got 'no'"):
                call("a", **{name: "no"})
    assert text.read_text() == "mine"
    assert model.tokenize("a", add_special_tokens=np.bool_(False)) == model.tokenize("a")[1:]


def test_a_batch_wider_than_the_model_is_noted(tiny, caplog, capsys):
    caplog.set_level(logging.INFO, "slimrt")
    for verbose in (False, True):
        with slimrt.Model(tiny, n_ctx=64, n_seqs=2, verbose=verbose) as model:
            capsys.readouterr(), caplog.clear()
            model.generate(["a", "b"], max_tokens=1)
            assert not caplog.records
            model.generate(["a", "b", "c"], max_tokens=1)
            assert ["3 texts are decoded 2 at a time" in one.getMessage() for one in caplog.records] == [True]
            assert capsys.readouterr().err.count("slimrt: 3 texts are decoded 2 at a time") == verbose


def test_notes_reach_the_log_and_the_terminal_of_the_command_line_alone(tiny, run, capsys, tmp_path):
    program = f"import slimrt; slimrt.Model({str(tiny)!r}, cache='k', n_ctx=64)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    silent = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    arguments = ("generate", tiny, "-p", PROMPT, "-n", 1, "--cache", "k", "-c", 64)
    folding = "slimrt: folding tiny.gguf for cache mode k"
    assert run(*arguments, "--no-progress")[2].count(folding) == 1
    assert folding not in run(*arguments, "-q")[2]
    slimrt.Model(tiny, cache="k", n_ctx=64).close()
    assert capsys.readouterr() == ("", "")


def test_a_note_is_shown_once_however_deep_and_only_inside(capsys):
    with notes.shown():
        with notes.shown(), notes.shown(False):
            notes.note("one")
        notes.note("one")
        notes.note("two")
    notes.note("three")
    assert capsys.readouterr().err == "slimrt: one\nslimrt: two\n"


def test_results_print_as_text(model, tiny):
    result = model.generate(PROMPT, max_tokens=5, **GREEDY)
    assert str(result) == result.text and repr(result).startswith("Generation(text=")
    assert str(model.score(PROMPT)).startswith("log-likelihood -")
    plan = slimrt.plan(tiny, n_ctx=64)
    lines = str(plan).splitlines()
    assert lines[1].split()[:3] == ["cache", "type", "weights"] and lines[2].startswith("kv ")
    assert lines[-1].startswith("kv f16: ") and " fits in " in lines[-1] and len(lines) > 5
    assert str(Segment(0, 0.0, 1.25, " hi", (1,), 0.0, 0.0, 1.0, 0.0)) == "[0.00 -> 1.25] hi"
    assert str(TranscriptionInfo("en", 0.5, 3.0, 2.0, 1)) == "language en (50%), 3.00 s, of which 2.00 s were heard"
    quality = CacheQuality(
        modes=("kv",), types=("f32",), ranks=(0,), residual_types=("",), cache="kv f32", perplexity=2.0, kl_mean=0.0,
        kl_p99=0.0, kl_max=float("inf"), same_top=1.0, bytes_per_token=8, cache_bytes=64, extra_weights=0,
    )  # fmt: skip
    assert "inf" in str(CacheComparison("m", 1, 1, 2, 1, 1, (quality,))).splitlines()[1]


def test_a_conversion_prints_as_its_table():
    report = ConvertReport(Path("k.gguf"), "k", "f16", "white", [LayerReport(0, "k", errors={"f16": 0.02})], ["hm"])
    assert str(report) == report.table() and str(report).endswith("warning: hm") and "caution" in str(report)


def test_control_tokens_come_back_only_when_asked_for(model):
    ids = model.tokenize("a cat")
    assert model.detokenize(ids) == "a cat"
    assert model.detokenize(ids, skip_special_tokens=False) == "<s>a cat"


def texts_of(model, prompts):
    """In another process."""
    return [model.generate(prompt, max_tokens=4, **GREEDY).text for prompt in prompts], model.info()["layers"][0][
        "mode"
    ]


@pytest.mark.unsanitized
def test_a_model_goes_to_another_process_by_path_and_arguments(tiny, monkeypatch):
    monkeypatch.chdir(tiny.parent)
    prompts = ["a", "the cat"]
    with slimrt.Model(slimrt.ModelSource(tiny.name), cache="k", cache_type="f32", n_ctx=48, seed=3) as model:
        seed = model.generate("a").seed
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            monkeypatch.chdir("/")
            assert pool.submit(texts_of, model, prompts).result(60) == texts_of(model, prompts)
        with copy.copy(model) as other:
            assert other.n_ctx == 48 and other.generate("a").seed == seed
        with pytest.raises(TypeError, match="a session's rows belong to this process: save"):
            pickle.dumps(model.session())
        with pytest.raises(TypeError, match="a stream cannot be copied or pickled"):
            copy.copy(model.stream("a"))


@pytest.mark.parametrize("name", ["tale-gpt2", "tale-llama", "tale-t5"])
def test_a_tokenizer_goes_to_another_process(name):
    tokenizer, text = slimrt.Tokenizer(SHIPPED / f"{name}.gguf"), "Tom went to the mill.</s> Once\nupon <s>"
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer), copy.copy(tokenizer)):
        for special in (True, False):
            ids = tokenizer.encode(text, parse_special=special)
            assert other.encode(text, parse_special=special) == ids
            assert other.decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("repo_id", "filename", "opened"),
    [
        ("org/name", None, "hf://org/name"),
        ("org/name", "*q8_0.gguf", "hf://org/name:*q8_0.gguf"),
        ("hf://org/name", "a.gguf", "hf://org/name:a.gguf"),
        ("./name", "a.gguf", "./name/a.gguf"),
        ("/nowhere/a.gguf", None, "/nowhere/a.gguf"),
    ],
)
def test_from_pretrained_opens_repositories_and_paths(monkeypatch, repo_id, filename, opened):
    def of(path, show_progress):
        raise FileNotFoundError(path)

    monkeypatch.setattr(slimrt.ModelSource, "of", of)
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(opened)}$"):
        slimrt.Model.from_pretrained(repo_id, filename, n_ctx=8)


def test_from_pretrained_finds_a_pattern_in_a_folder(tiny, tmp_path):
    for name in ("a-q8_0.gguf", "a-f16.gguf", "mmproj-a-q8_0.gguf", "a-q8_0-00002-of-00002.gguf"):
        (tmp_path / name).symlink_to(tiny)
    with slimrt.Model.from_pretrained(tmp_path, "*Q8_0.gguf", n_ctx=8) as model:
        assert "a-q8_0.gguf" in repr(model)
    with pytest.raises(ValueError, match=r"2 models match, a-f16.gguf and a-q8_0.gguf among them: name one"):
        slimrt.Model.from_pretrained(tmp_path, "*.gguf")
    (tmp_path / "sub").mkdir()
    for name in ("B.GGUF", "ggml-b.bin"):
        (tmp_path / "sub" / name).symlink_to(tiny)
    for pattern in ("*/b*", "*B.*", "sub/ggml-*.bin"):
        with slimrt.Model.from_pretrained(tmp_path, pattern, n_ctx=8) as model:
            assert model.n_ctx == 8
    with pytest.raises(FileNotFoundError, match=r"\*q4.gguf: no such file"):
        slimrt.Model.from_pretrained(tmp_path, "*q4.gguf")


def test_from_pretrained_takes_the_options_of_model(tiny):
    with slimrt.Model.from_pretrained(tiny.parent, tiny.name, n_ctx=8) as model:
        assert model.n_ctx == 8
    with pytest.raises(TypeError, match="Model has no n_ubatch"):
        slimrt.Model.from_pretrained(str(tiny), n_ubatch=512)


def test_a_file_that_changed_meanwhile_is_not_the_pickled_model(tmp_path):
    from tiny_model import write_tiny

    path = write_tiny(tmp_path / "model.gguf")
    with slimrt.Model(path, n_ctx=64) as model:
        pickled = pickle.dumps(model)
    pickle.loads(pickled).close()
    write_tiny(path, seed=1)
    with pytest.raises(slimrt.ModelFormatError, match="not the model that was pickled"):
        pickle.loads(pickled)


@pytest.mark.unsanitized
def test_a_users_program_passes_mypy_strict():
    """Its lines are those of docs/tasks.md and of README, and what is made of their results."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(TESTS / "typed_program.py")],
        capture_output=True, text=True, cwd=TESTS.parent, env=os.environ | {"MYPYPATH": str(TESTS.parent / "python")},
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
