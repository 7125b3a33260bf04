# SPDX-License-Identifier: Apache-2.0
"""The slimrt command's flags, their twins in the environment, and what wrong ones say."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

import slimrt
from conftest import PROMPT

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cache", "x"), "layer 0"),
        (("--n-source", 4), "for models with an encoder"),
        (("--calibration", "/none.txt"), "/none.txt: no such calibration text"),
        (("--memory-limit", "1KiB"), "needs"),
        (("--logit-bias", "99999=1"), "logit_bias names token 99999"),
        (("--load-session", "/none"), "No such file"),
    ],
)
def test_errors_are_one_sentence(run, tiny, arguments, said):
    code, out, err = run("generate", tiny, "-p", PROMPT, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("slimrt: error: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cache", "kk"), "did you mean 'k'?"),
        (("--cache", "e1"), "'e1' is a mode of cross-attention: give it as cross (--cross e1)"),
        (("--cache", "kr"), "supported: auto, kv, k"),
        (("--cache", "k:q8:4"), "has no residual"),
        (("--cache", "kv", "--rank", 4), "no layer has it"),
        (("--cache", "auto:q8:x"), "not a whole number"),
        (("--cache", "low"), "'low' is not supported"),
        (("--cache", "lowrank:q2@2"), "'2' is not a number from 0 to 1"),
        (("--cache", "lowrank:q2+q5"), "'q5'"),
        (("--cache", "kv:q2+q4"), "cache type 'q2+q4' is not supported"),
        (("--cache-type", "int3"), "supported: f32, f16, bf16, q8"),
        (("-ctk", "q5_1"), "cache type 'q5_1' is not supported"),
        (("--device", "tpu"), "supported: auto, cpu"),
        (("--rank", 4, "--cache", "kv"), "no layer has it: kv"),
        (("--cache", "kv:q8", "--cache-type", "q4"), "says the type of its rows: leave --cache-type out"),
        (("--cache", "kv:q8,kv:q4", "-ctk", "q4"), "says the type of its rows: leave --cache-type-k out"),
        (("--memory-limit", "lots"), "not a size"),
        (("--temp", -1), "--temp: must not be negative, got -1"),
        (("--temp", "inf"), "finite"),
        (("--top-p", 2), "--top-p: must be at most 1"),
        (("--top-k", -3), "--top-k: must not be negative"),
        (("--typical-p", 2), "--typical-p: must be at most 1"),
        (("--repeat-last-n", -2), "--repeat-last-n: must be at least -1"),
        (("--logit-bias", "5=nan"), "a token id and a number"),
        (("--logit-bias", "5:1"), "a token id and a number"),
        (("--stop", ""), "--stop: must not be empty"),
        (("-n", -2), "-n/--n-predict: must be at least -1"),
        (("-n", "x"), "-n/--n-predict: must be a whole number, got 'x'"),
        (("--seed", -5), "-s/--seed: must not be negative"),
        (("--seed", 1 << 63), "-s/--seed: must be at most"),
        (("-c", 0), "-c/--ctx: must be at least 1"),
        (("-c", 1 << 31), "-c/--ctx: must be at most 2147483647"),
        (("-t", 99999999999999), "-t/--threads: must be at most 2147483647"),
        (("--cache-tokens", 1 << 31), "--cache-tokens: must be at most"),
        (("--rank", 1 << 31, "--cache", "k+r"), "--rank: must be at most"),
        (("--top-k", 1 << 31), "--top-k: must be at most"),
        (("-n", 1 << 31), "-n/--n-predict: must be at most"),
        (("--sparse-threshold", "1"), "below 1"),
        (("-m", "other.gguf"), "one model"),
        (("-hff", "x.gguf"), "-hff names a file of a repository"),
        (("--keep", 4), "n_keep=4 says what a shifted context keeps"),
        (("--mirostat", 2, "--top-k", 5), "top_k=5 does not go with mirostat=2"),
        (("extra",), "'extra' is one word too many"),
        (("--stop",), "--stop: expected one argument"),
    ],
)
def test_wrong_usage_is_one_sentence(run, tiny, arguments, said):
    """Exit code 2, before the model is looked at, and no more than a line."""
    code, out, err = run("generate", tiny, "-p", PROMPT, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("slimrt: error: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rank", 4), "for cache 'k+r', not for a conversion that names none"),
        (("--exact",), "those of cache 'k' and 'v', not of a conversion that names none"),
        (("--cache", "kv", "--bits", "2,4"), "for cache 'lowrank', not for 'kv'"),
        (("--target-error", "1%", "--target-bytes", "6x"), "target_bytes were given: give one of them"),
        (("--cache-type", "q8"), "this conversion is for none: name it too (--cache)"),
        (("--cache", "k:q8", "--cache-type", "q4"), "leave one out"),
        (("--outtype", "q9"), "unknown outtype 'q9'; the types are: f32, f16"),
        (("--cache", "nosuch"), "unknown cache mode 'nosuch'; the modes are: kv, k, "),
    ],
)
def test_wrong_usage_of_convert(run, tmp_path, arguments, said):
    """The same, so that there need be no model."""
    code, out, err = run("convert", tmp_path / "none.gguf", "-o", tmp_path / "out.gguf", *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err


def test_a_path_that_is_not_utf_8(run, tiny, tmp_path):
    """One sentence, whatever reads the file; a link with another name is as good."""
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf")
    shutil.copy(tiny, odd)
    for words in (("generate", odd, "-p", PROMPT), ("inspect", odd), ("convert", odd, "-o", tmp_path / "out.gguf")):
        code, out, err = run(*words)
        assert (code, out) == (1, "") and "this path is not UTF-8" in err and err.count("\n") == 1
    (tmp_path / "link.gguf").symlink_to(odd)
    assert run("generate", tmp_path / "link.gguf", "-p", PROMPT, "-n", 1)[0] == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_help_that_a_full_disk_does_not_take():
    with open("/dev/full", "w") as full:
        for words in (["--help"], ["generate", "--help"], ["--version"]):
            done = subprocess.run([sys.executable, "-m", "slimrt", *words], stdout=full, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (1, b"slimrt: error: stdout: No space left on device\n")


def test_a_missing_model(run, tmp_path):
    assert run("generate", tmp_path / "none", "-p", "x") == (
        1, "", f"slimrt: error: {tmp_path / 'none'}: no such file or directory\n",
    )  # fmt: skip


def test_tracebacks_only_when_asked_for(run, tiny, monkeypatch):
    assert "Traceback" not in run("generate", tiny, "-p", "x", "--cache", "x", "-v")[2]
    assert "Traceback" in run("generate", tiny, "-p", "x", "--cache", "x", "-vv")[2]
    monkeypatch.setenv("SLIMRT_DEBUG", "1")
    assert "Traceback" in run("generate", tiny, "-p", "x", "--cache", "x")[2]


@pytest.mark.parametrize(
    "arguments",
    [(), ("fly",), ("generate",), ("generate", "a", "-m", "b"), ("generate", "a", "-n", "x"), ("convert", "a"),
     ("plan", "a", "-c", "many"), ("plan", "a", "--sparse-threshold", "x"), ("forecast", "a", "--quantiles", "x"),
     ("plan", "a", "-c", "0"), ("plan", "a", "--sparse-threshold", "1"), ("generate", "a", "--logit-bias", "5:1"),
     ("generate", "a", "--logit-bias", "5=x")],
)  # fmt: skip
def test_wrong_usage(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and "error:" in err and " _" not in err  # no name of ours
    assert err.count("\n") == 1


def test_version_and_help(run):
    assert run("--version") == (0, f"slimrt {slimrt.__version__}\n", "")
    for verb in ("generate", "chat", "convert", "inspect", "plan", "perplexity", "doctor"):
        assert verb in run("--help")[1]
        assert "SLIMRT_" in run(verb, "--help")[1]


def test_types_beside_a_cache_that_says_its_own(run, tiny, monkeypatch):
    """Some layers may leave theirs open; and a setting of all commands stands behind what is typed."""
    words = ("generate", tiny, "-p", PROMPT, "-n", 1, "--json", "--cache")
    assert json.loads(run(*words, "kv:q8,kv", "--cache-type", "q4")[1])["cache"]["types"] == ["q8", "q4"]
    monkeypatch.setenv("SLIMRT_CACHE_TYPE", "Q4")
    assert json.loads(run(*words, "kv:q8")[1])["cache"]["types"] == ["q8", "q8"]


def test_model_as_flag_or_in_the_environment(run, tiny, monkeypatch):
    limit = ("--memory-limit", "1GiB")
    expected = run("plan", tiny, *limit)
    assert run("plan", "-m", tiny, *limit) == expected
    monkeypatch.setenv("SLIMRT_MODEL", str(tiny))
    assert run("plan", *limit) == expected
    assert run("plan", "/none.gguf")[0] == 1


def test_sampling_flags(run, tiny, monkeypatch):
    """Each is the option of its name: a bias beside penalties that work against it."""
    plain = ("generate", tiny, "-p", PROMPT, "-n", 4, "--temp", 0, "--json")

    def tokens(*flags):
        return json.loads(run(*plain, *flags)[1])["tokens"]

    biases = ("--logit-bias", "9=100", "--logit-bias", "8=90", "--logit-bias", "7=-inf")
    assert tokens(*biases) == [9] * 4
    for penalty in (("--frequency-penalty", 20), ("--presence-penalty", 20), ("--repeat-penalty", 1.25)):
        assert tokens(*biases, *penalty)[:2] == [9, 8]
        assert tokens(*biases, *penalty, "--repeat-last-n", 0) == [9] * 4
    monkeypatch.setenv("SLIMRT_LOGIT_BIAS", "8=100")
    assert tokens() == [8] * 4 and tokens("--logit-bias", "9=100") == [9] * 4
    monkeypatch.setenv("SLIMRT_LOGIT_BIAS", "x")
    assert run(*plain)[0] == 2
    monkeypatch.undo()
    warm = ("generate", tiny, "-p", PROMPT, "-n", 1, "--json", "--top-k", 0, "--top-p", 1, "--min-p", 0, "--temp", 9)
    picked = {json.loads(run(*warm, "--seed", i, "--typical-p", 1e-6)[1])["tokens"][0] for i in range(4)}
    assert len(picked) == 1  # the one that is nearest to the entropy


def test_flags_of_other_samplers(run, tiny):
    """Each changes the choice as the option of its name does, from llama.cpp's names."""
    text = ("generate", tiny, "-p", PROMPT, "-n", 12, "--seed", 3, "--ignore-eos", "--json")

    def tokens(*flags):
        return json.loads(run(*text, *flags)[1])["tokens"]

    def options(**more):
        with slimrt.Model(tiny, n_ctx=64) as model:
            return list(model.generate(PROMPT, max_tokens=12, seed=3, ignore_eos=True, **more).tokens)

    usual = tokens()
    for flags, same in (
        (("--mirostat", 2, "--mirostat-ent", 2, "--mirostat-lr", 0.3),
         {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3}),
        (("--xtc-probability", 1, "--xtc-threshold", 0.01), {"xtc_probability": 1.0, "xtc_threshold": 0.01}),
        (("--top-nsigma", 0.5), {"top_n_sigma": 0.5}),
        (("--dry-multiplier", 50, "--dry-allowed-length", 0, "--dry-sequence-breaker", "none"),
         {"dry_multiplier": 50.0, "dry_allowed_length": 0, "dry_sequence_breakers": []}),
        (("--dry-multiplier", 50, "--dry-allowed-length", 0, "--dry-base", 1, "--dry-penalty-last-n", 9,
          "--dry-sequence-breaker", "e"),
         {"dry_multiplier": 50.0, "dry_allowed_length": 0, "dry_base": 1.0, "dry_penalty_last_n": 9,
          "dry_sequence_breakers": ["e"]}),
    ):  # fmt: skip
        assert tokens(*flags) == options(**same) != usual
    code, _, err = run(*text, "--mirostat", 1)
    assert code == 1 and "mirostat 1 is not supported: mirostat 2" in err


def test_answers_and_beams_in_the_command(run, tiny):
    text = ("generate", tiny, "-p", PROMPT, "-n", 6, "--ignore-eos")
    with slimrt.Model(tiny, n_ctx=64, n_seqs=3) as model:
        drawn = model.generate(PROMPT, n=3, max_tokens=6, seed=2, ignore_eos=True)
        best = model.generate(PROMPT, n=2, max_tokens=6, num_beams=3, length_penalty=0.5, ignore_eos=True)
    out = run(*text, "--answers", 3, "--seed", 2)[1]
    assert out == "\n\n".join(PROMPT + one.text for one in drawn) + "\n"
    answers = json.loads(run(*text, "--answers", 3, "--seed", 2, "--json")[1])["answers"]
    assert [one["tokens"] for one in answers] == [list(one.tokens) for one in drawn]
    beams = (*text, "--num-beams", 3, "--length-penalty", 0.5, "--no-display-prompt")
    assert run(*beams)[1] == best[0].text + "\n"
    assert run(*beams, "--answers", 2)[1] == f"{best[0].text}\n\n{best[1].text}\n"
    assert json.loads(run(*beams, "--early-stopping", "--json")[1])["prompt"] == PROMPT
    code, out, err = run(*text, "--answers", 2, "--save-session", "s")
    assert (code, out) == (2, "") and "no --answers" in err
    code, out, err = run(*text, "--num-beams", 2, "--temp", 0.5)
    assert (code, out) == (2, "") and "temperature=0.5 does not go with num_beams=2" in err


def test_logprobs_in_json(run, tiny):
    text = ("generate", tiny, "-p", PROMPT, "-n", 3, "--temp", 0, "--logprobs", 2)
    result = json.loads(run(*text, "--json")[1])
    assert [one["token"] for one in result["logprobs"]] == result["tokens"]
    for one in result["logprobs"]:
        assert len(one["top"]) == 2 and one["top"][0] == {key: one[key] for key in ("token", "text", "logprob")}
    code, out, err = run(*text)
    assert (code, out) == (2, "") and "give --json too" in err


def test_a_shifted_context_is_said_and_saved(run, tiny, tmp_path):
    text = ("generate", tiny, "-p", PROMPT, "-n", 40, "--temp", 0, "--ignore-eos", "-c", 32, "--json")
    shift, file = ("--context-shift", "--keep", 3), tmp_path / "s"
    code, out, err = run(*text, *shift, "--save-session", file)
    result = json.loads(out)
    assert code == 0 and len(result["tokens"]) == 40
    assert f"the context of 32 tokens was full: {result['shifted']} older ones were dropped" in err
    with slimrt.Model(tiny, n_ctx=32) as model, model.load_session(file) as session:
        context = model.tokenize(PROMPT) + result["tokens"]
        assert list(session.tokens) == context[:3] + context[3 + result["shifted"] :]
    assert json.loads(run(*text)[1])["finish_reason"] == "context"
    assert "n_keep=3 says what a shifted context keeps" in run(*text, "--keep", 3)[2]


def test_twins_in_the_environment(run, tiny, monkeypatch):
    monkeypatch.setenv("SLIMRT_JSON", "1")
    monkeypatch.setenv("SLIMRT_CACHE_TYPE", "f32")
    monkeypatch.setenv("SLIMRT_CTX", "96")
    monkeypatch.setenv("SLIMRT_SEED", "5")
    monkeypatch.setenv("SLIMRT_N_PREDICT", "3")
    result = json.loads(run("generate", tiny, "-p", PROMPT)[1])
    assert result["cache"]["types"] == ["f32", "f32"] and result["seed"] == 5 and len(result["tokens"]) == 3
    assert json.loads(run("generate", tiny, "-p", PROMPT, "--seed", "6")[1])["seed"] == 6
    assert json.loads(run("plan", tiny)[1])["n_ctx"] == 96
    assert json.loads(run("plan", tiny, "-c", 64)[1])["n_ctx"] == 64
    monkeypatch.setenv("SLIMRT_CTX", "many")
    code, _, err = run("plan", tiny)
    assert code == 2 and "many" in err
    monkeypatch.setenv("SLIMRT_CTX", "")
    monkeypatch.setenv("SLIMRT_JSON", "0")
    assert "largest ctx" in run("plan", tiny)[1]
    monkeypatch.setenv("SLIMRT_VERBOSE", "1")
    monkeypatch.setenv("SLIMRT_STOP", "e")
    assert "first token" in run("generate", tiny, "-p", PROMPT)[2]
    monkeypatch.setenv("SLIMRT_JSON", "maybe")
    code, _, err = run("plan", tiny)
    assert code == 2 and "SLIMRT_JSON is 'maybe'" in err


def test_a_wrong_twin_is_said_by_its_own_verb_alone(run, tiny, monkeypatch):
    monkeypatch.setenv("SLIMRT_FORMAT", "doc")
    monkeypatch.setenv("SLIMRT_WORD_TIMESTAMPS", "maybe")
    assert run("plan", tiny)[0] == 0
    code, _, err = run("transcribe", tiny, "a.wav")
    assert code == 2 and "--format: invalid choice: 'doc' (choose from txt, srt, vtt, tsv, csv, lrc, json)" in err
    code, _, err = run("transcribe", tiny, "a.wav", "--format", "txt")  # the flag wins
    assert code == 2 and "SLIMRT_WORD_TIMESTAMPS is 'maybe'" in err
    assert run("transcribe", tiny, "a.wav", "--format", "json", "--word-timestamps")[0] == 1  # a.wav is missing


def test_a_repeated_flag_wins_over_its_twin(run, tiny, monkeypatch):
    arguments = ("generate", tiny, "-p", PROMPT, "-n", 20, "--temp", 0, "--no-echo", "--ignore-eos")
    whole = run(*arguments)[1]
    monkeypatch.setenv("SLIMRT_STOP", whole[3])
    assert run(*arguments)[1] == whole.partition(whole[3])[0] + "\n"
    assert run(*arguments, "--stop", "0123", "--stop", "4567")[1] == whole


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch):
    from slimrt.cli.common import coloured

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("x", "red", io.StringIO()) == "x"
    assert coloured("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("x", "red", Terminal()) == "x"
