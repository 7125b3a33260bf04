# SPDX-License-Identifier: Apache-2.0
"""The slimrt command's verbs: what goes where, signals, pipes, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, PROMPT, third_party
from slimrt.cli import generate
from slimrt.generation.stream import Stream
from slimrt.modelfile.gguf import Tensor, read_gguf, write_gguf
from slimrt.runtime.session_file import read_header
from tiny_model import write_tiny

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time


@pytest.fixture
def typed(monkeypatch):
    """typed(text): what stdin holds, through a pipe."""

    def put(text: str | bytes):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


def command(*arguments, **options):
    """A process of its own, with pipes."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "slimrt", *map(str, arguments)], **(pipes | options))


# ---------------------------------------------------------------- generate
def test_published_text_of_stories260k():
    folder = third_party("models/stories260K")
    process = command("generate", folder / "stories260K.gguf", "-p", "", "-n", 200, "--temp", 0)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert out == (folder / "expected_greedy_200.txt").read_bytes()


def test_generate_prints_prompt_and_text(run, tiny):
    arguments = ("generate", tiny, "-p", PROMPT, "-n", 9, "--temp", 0, "--ignore-eos")
    with slimrt.Model(tiny) as model:
        text = model.generate(PROMPT, max_tokens=9, temperature=0, ignore_eos=True).text
    assert run(*arguments) == (0, PROMPT + text + "\n", "")
    assert run(*arguments, "--no-display-prompt") == (0, text + "\n", "")
    assert run(*arguments, "--no-echo")[1] == text + "\n"


def test_prompt_from_file_and_pipe(run, tiny, tmp_path, typed):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    expected = run("generate", tiny, "-p", PROMPT, "-n", 5, "--seed", 1)
    assert run("generate", tiny, "-f", file, "-n", 5, "--seed", 1) == expected
    typed(PROMPT + "\n")
    assert run("generate", tiny, "-n", 5, "--seed", 1) == expected
    for text in ("\ufeff" + PROMPT, "\ufeff" + PROMPT + "\n"):  # a byte order mark is no text
        typed(text)
        assert run("generate", tiny, "-n", 5, "--seed", 1) == expected
        file.write_text(text)
        assert run("generate", tiny, "-f", file, "-n", 5, "--seed", 1) == expected
    typed(b"\xff")
    code, out, err = run("generate", tiny)
    assert (code, out) == (1, "") and "stdin: not UTF-8" in err
    assert run("generate", tiny, "-p", PROMPT, "-f", file)[0] == 2


def test_generate_json(run, tiny):
    code, out, err = run("generate", tiny, "-p", PROMPT, "-n", 5, "--seed", 1, "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["prompt"] == PROMPT and len(result["tokens"]) == 5 and result["seed"] == 1
    assert result["finish_reason"] == "length" and result["cache"]["modes"] == ["kv", "kv"]


def test_verbose_tells_timings(run, tiny):
    err = run("generate", tiny, "-p", PROMPT, "-n", 5, "-v")[2]
    assert "first token after" in err and "tok/s" in err and "cache" in err and "context 32 of 256" in err


def test_context_is_as_large_as_needed(run, tiny):
    ids = 1 + len(PROMPT) + 1
    assert "context 64 of 256" in run("generate", tiny, "-p", PROMPT, "-n", 65 - ids - 1, "-v")[2]
    assert "context 96 of 256" in run("generate", tiny, "-p", PROMPT, "-n", 65 - ids, "-v")[2]
    assert "context 256 of 256" in run("generate", tiny, "-p", PROMPT, "-n", 5000, "--stop", "e", "-v")[2]
    assert "context 128 of 256" in run("generate", tiny, "-p", PROMPT, "-n", 1, "-c", 128, "-v")[2]
    code, out, err = run("generate", tiny, "-p", PROMPT, "-n", 99, "-c", 32, "--ignore-eos")
    assert code == 0 and out.startswith(PROMPT) and "context of 32 tokens is full" in err
    assert run("generate", tiny, "-p", PROMPT, "-n", 99, "-c", 32, "--ignore-eos", "-q")[2] == ""
    code, out, err = run("generate", tiny, "-p", "a" * 300)
    assert (code, out) == (1, "") and err.startswith("slimrt: error: the prompt has 302 tokens")


def test_stop(run, tiny):
    whole = run("generate", tiny, "-p", PROMPT, "-n", 20, "--temp", 0, "--no-echo", "--ignore-eos")[1]
    stop = whole[6]
    out = run("generate", tiny, "-p", PROMPT, "-n", 20, "--temp", 0, "--no-echo", "--ignore-eos",
              "--stop", "0123", "--stop", stop)[1]  # fmt: skip
    assert out == whole.partition(stop)[0] + "\n"


def test_a_session_goes_on_where_it_was_saved(run, tiny, tmp_path):
    common = ("generate", tiny, "--temp", 0, "--ignore-eos", "-c", 64, "--json")
    whole, file = json.loads(run(*common, "-p", PROMPT, "-n", 16)[1]), tmp_path / "s"
    code, first, _ = run(*common, "-p", PROMPT, "-n", 6, "--save-session", file)
    assert code == 0
    code, rest, err = run(*common, "-p", "", "-n", 10, "--load-session", file, "-v")
    assert code == 0
    assert json.loads(first)["tokens"] + json.loads(rest)["tokens"] == whole["tokens"]
    assert "prefill 1 tokens" in err
    assert run(*common, "-p", " and", "-n", 3, "--load-session", file, "--save-session", tmp_path / "t")[0] == 0
    code, out, err = run(*common, "-p", "", "--load-session", file, "--cache-type", "f32")
    assert (code, out) == (1, "") and "another cache" in err


def test_ctrl_c_keeps_what_was_printed(tiny):
    process = command("generate", tiny, "-p", PROMPT, "-n", -1, "--temp", 0, "--ignore-eos", "-c", 200000)
    shown = process.stdout.read(len(PROMPT) + 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (shown + out).startswith(PROMPT.encode()) and out.endswith(b"\n")
    assert b"Traceback" not in err


def test_ctrl_c_saves_the_session(tiny, tmp_path):
    flags = ("-n", -1, "--temp", 0, "--ignore-eos", "-c", 200000, "--save-session", tmp_path / "s")
    process = command("generate", tiny, "-p", PROMPT, *flags)
    process.stdout.read(len(PROMPT) + 1)
    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=60)[1] and process.returncode == 130
    saved = read_header(tmp_path / "s")["tokens"]
    with slimrt.Model(tiny, n_ctx=200000) as model:
        ids = model.tokenize(PROMPT)
        options = {"max_tokens": len(saved) - len(ids), "temperature": 0, "ignore_eos": True}
        assert saved == [*ids, *model.generate(ids, **options).tokens] and len(saved) > len(ids)


def test_ctrl_c_before_the_text_names_the_session_that_is_not_saved(run, tiny, tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "__next__", interrupted)
    code, _, err = run("generate", tiny, "-p", PROMPT, "--save-session", tmp_path / "s")
    assert code == 130 and f"{tmp_path / 's'} is not written" in err and not (tmp_path / "s").exists()


def test_ctrl_c_after_a_shift_saves_the_session(run, tiny, tmp_path, monkeypatch):
    pieces, following = [], Stream.__next__

    def interrupted(self):
        if len(pieces) == 8:
            raise KeyboardInterrupt
        pieces.append(following(self))
        return pieces[-1]

    monkeypatch.setattr(Stream, "__next__", interrupted)
    with slimrt.Model(tiny, n_ctx=200) as model:
        ids = model.tokenize(PROMPT * 4)
    shift = ("--temp", 0, "--ignore-eos", "-c", len(ids) + 2, "--context-shift")
    code, _, err = run("generate", tiny, "-p", PROMPT * 4, "-n", 40, *shift, "--save-session", tmp_path / "s")
    saved = read_header(tmp_path / "s")["tokens"]
    assert code == 130 and "older ones were dropped" in err and len(saved) < len(ids)


def test_a_saved_session_has_no_drafts(tiny, tmp_path):
    """Ctrl-C may leave some behind the text."""
    with slimrt.Model(tiny, n_ctx=64) as model, model.session() as session:
        ids = model.tokenize(PROMPT)
        session.append([*ids, 5, 6, 7])
        generate._save(session, [*ids, 5], 0, str(tmp_path / "s"), overwrite=False)
    assert read_header(tmp_path / "s")["tokens"] == [*ids, 5]


def test_a_reader_that_goes_away(tiny):
    process = command("generate", tiny, "-p", PROMPT, "-n", -1, "--temp", 0, "--ignore-eos", "-c", 200000)
    process.stdout.read(len(PROMPT) + 1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("arguments", [("plan", "{tiny}", "--json"), ("--version",)])
def test_output_that_nobody_takes(tiny, arguments):
    # Buffered, as without PYTHONUNBUFFERED: a short result meets the pipe or the disk only when it is flushed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    arguments = [argument.format(tiny=tiny) for argument in arguments]
    process = command(*arguments, env=environment)
    process.stdout.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (141, b"")
    process.stderr.close()
    with open("/dev/full", "wb") as full:
        process = command(*arguments, stdout=full, env=environment)
        assert process.communicate(timeout=60)[1] == b"slimrt: error: stdout: No space left on device\n"
        assert process.returncode == 1


def test_closed_streams(tiny, tmp_path):
    lost = b"slimrt: error: stdout: Bad file descriptor\n"
    for line, code, said in (
        ("plan $1 >&-", 1, lost),  # it was done, and its result lost
        ("plan $1 >&- 2>&-", 1, b""),
        ("plan $1 <&-", 0, b""),
        ("generate $1 -p a -n 1 -q --no-display-prompt --save-session $2 >&-", 1, lost),
        ("transcribe $1 - <&-", 1, b"stdin: an empty file\n"),
    ):
        shell = ["sh", "-c", f'"$0" -m slimrt {line}', sys.executable, tiny, tmp_path / "s"]
        process = subprocess.run(shell, capture_output=True)
        assert process.returncode == code and process.stderr.endswith(said), line
    line = f'"$0" -m slimrt generate "$1" -n 2 --temp 0 -p "{PROMPT}" -v 2>&-'
    process = subprocess.run(["sh", "-c", line, sys.executable, tiny], capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout.startswith(PROMPT) and "slimrt:" not in process.stdout


def test_a_session_file_is_checked_before_the_work(run, tiny, tmp_path):
    for target, said in ((tmp_path / "none" / "s", "no such directory"), (tmp_path, "is a directory"),
                         (os.devnull, "not a plain file"), (tiny, "would replace the model")):  # fmt: skip
        code, out, err = run("generate", tiny, "-p", PROMPT, "--save-session", target)
        assert (code, out) == (1, "") and said in err


def test_a_session_file_with_broken_tokens(run, tiny, tmp_path):
    for tokens in ({}, {"tokens": 5}, {"tokens": ["a"]}, {"tokens": [1.5]}):
        header = json.dumps({"version": 2, "bytes": 0} | tokens).encode()
        (tmp_path / "s").write_bytes(b"SLIMRTSE" + len(header).to_bytes(8, "little") + header)
        code, out, err = run("generate", tiny, "-p", PROMPT, "--load-session", tmp_path / "s")
        assert (code, out) == (1, "") and "the header of this session file is broken" in err


# ---------------------------------------------------------------- chat
def test_chat_over_a_pipe(run, tiny, typed, tmp_path):
    saved = tmp_path / "chat.json"
    typed(f"hello\n/stats\nand now\n/save {saved}\n/reset\nhello\n/help\n/exit\nnot read\n")
    code, out, err = run("chat", tiny, "--temp", 0, "-n", 6, "--json", "--system", "be brief", "-v")
    assert code == 0
    first, second, again = [json.loads(line) for line in out.splitlines()]
    assert first["text"] == again["text"]
    assert first["usage"]["cached_tokens"] == again["usage"]["cached_tokens"] == 0
    # All of the first turn but the last token of its answer, which was never computed, if it reads back the same.
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == first["text"]
    assert "of 256 tokens, cache" in err and "/regenerate " in err


def test_chat_prints_answers(run, tiny, typed):
    typed("hello\n")
    code, out, err = run("chat", tiny, "--seed", 1, "-n", 4)
    with slimrt.Model(tiny) as model:
        expected = model.chat([{"role": "user", "content": "hello"}], seed=1, max_tokens=4).text
    assert (code, out, err) == (0, expected + "\n", "")


def test_chat_that_outgrows_the_context(run, tiny, typed):
    typed("a" * 50 + "\n")
    code, out, err = run("chat", tiny, "-c", 32)
    assert (code, out) == (1, "") and "the prompt has" in err


def test_chat_without_a_template(run, typed):
    model = third_party("models/stories260K") / "stories260K.gguf"
    typed("hello\n")
    code, out, err = run("chat", model)
    assert (code, out) == (1, "") and "no chat template" in err


# ---------------------------------------------------------------- inspect, plan, doctor, convert
def test_inspect(run, tiny, grouped, convert):
    code, out, err = run("inspect", grouped)
    assert (code, err) == (0, "")
    assert "llama.context_length = 256" in out and "chat template: yes" in out
    assert "kv      yes, bytes a token: 128 in f16, 96 in q8" in out and "k       no: layer 0" in out
    report = json.loads(run("inspect", tiny, "--json")[1])
    assert [m["mode"] for m in report["cache_modes"] if m["legal"]] == ["kv", "k", "k+r", "kivi", "lowrank"]
    lowrank = next(m for m in report["cache_modes"] if m["mode"] == "lowrank")
    assert lowrank["bytes_per_token_by_type"] == {"q2@0.5+q4*0.1": 2 * (32 * 3 // 8 + 16 // 4 + 4)}
    assert "lowrank yes, bytes a token: 40 in q2@0.5+q4*0.1\n" in run("inspect", tiny)[1]
    assert all(m["reason"] for m in report["cache_modes"] if not m["legal"])
    assert report["bytes"] == sum(tensor["bytes"] for tensor in report["tensors"])
    assert "blk.0.attn_k.weight" in run("inspect", tiny, "-v")[1]
    sizes = {m["mode"]: m["bytes_per_token_by_type"] for m in report["cache_modes"] if m["legal"]}
    assert report["pays"]["f16"] == {"mode": "k", "bytes_per_token": sizes["k"]["f16"], "of_kv": 0.5}
    assert "pays in f16: k, 50 % of kv's bytes\n" in run("inspect", tiny)[1]
    assert "pays in q8: kv itself\n" in run("inspect", convert(GOLDEN / "gemma3"))[1]  # K is too narrow for V
    assert "pays in f16: kv itself\n" in out and json.loads(run("inspect", grouped, "--json")[1])["pays"]["f16"] is None


def test_inspect_of_what_cannot_run(run):
    code, out, _ = run("inspect", third_party("tokenizers/ggml-vocab-mpt.gguf"))
    assert code == 0 and "0 tensors" in out and "none: " in out


def test_inspect_of_types_that_cannot_run(run, tiny, tmp_path):
    """What is in the file, and which tensor stands in the way."""
    path, rows = tmp_path / "one_bit.gguf", np.zeros((3, 2 * 50), np.uint8)
    one_bit = Tensor("blk.0.attn_q.weight", (3, 512), gguf.GGMLQuantizationType.IQ1_S, lambda: rows)
    write_gguf(path, read_gguf(tiny).with_tensors(one_bit), show_progress=False)
    code, out, _ = run("inspect", path)
    assert code == 0 and "general.architecture = 'llama'" in out and "  iq1_s: 1, 300 B\n" in out
    assert "none: " in out and "tensor 'blk.0.attn_q.weight' at byte" in out and "has type IQ1_S (19)" in out
    report = json.loads(run("inspect", path, "--json")[1])
    found = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert found[one_bit.name] == {"name": one_bit.name, "type": "iq1_s", "rows": 3, "cols": 512, "bytes": 300}
    plain = json.loads(run("inspect", tiny, "--json")[1])
    assert [t for t in report["tensors"] if t["name"] != one_bit.name] == sorted(
        (t for t in plain["tensors"] if t["name"] != one_bit.name), key=lambda t: list(found).index(t["name"])
    )
    assert report["cache_modes"] == [] and report["metadata"] == plain["metadata"]
    code, _, err = run("plan", path)
    assert code != 0 and "has type IQ1_S" in err
    code, _, err = run("inspect", path, "--spectrum")
    assert code != 0 and "has type IQ1_S" in err


def test_plan_and_its_exit_code(run, tiny, tmp_path):
    code, out, err = run("plan", tiny, "-c", 256)
    assert (code, err) == (0, "") and "fits" in out and "v: not for this model: layer 0" in out
    total = json.loads(run("plan", tiny, "--json")[1])["asked"]["total"]
    assert run("plan", tiny, "--memory-limit", total)[0] == 0
    code, out, err = run("plan", tiny, "--memory-limit", total - 1)
    assert (code, err) == (1, "") and "does not fit" in out
    long = write_tiny(tmp_path / "long.gguf", n_ctx=8192)  # where the cache outweighs the scratch
    total_kv = json.loads(run("plan", long, "-c", 8192, "--json")[1])["asked"]["total"]
    assert run("plan", long, "-c", 8192, "--memory-limit", total_kv, "--cache", "k")[0] == 0
    assert run("plan", tiny, "--memory-limit", total, "--parallel", 2)[0] == 1
    table = run("plan", long)[1]
    assert re.search(r"^k .* from \d+$", table, re.M) and re.search(r"^lowrank .* never$", table, re.M)
    assert "lowrank q2@0.5+q4*0.1: 9.14 times smaller than kv f16 by types and shares alone" in table
    assert "a text of 4096 tokens holds 183.0 KiB, and more is allocated" in table
    assert run("plan", tiny, "--cache", "kv:q8")[1].splitlines()[-1].startswith("kv q8: ")
    mixed = json.loads(run("plan", tiny, "--cache", "kv,k", "--json")[1])
    assert mixed["asked"]["modes"] == ["kv", "k"] and mixed["fits"]


def test_doctor(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert slimrt.__version__ in out and "GB/s" in out
    report = json.loads(run("doctor", "--json", "-t", 1)[1])
    assert report["threads"] == 1 and report["read_bandwidth"] > 0
    assert {name.split(":")[0] for name in report["devices"]} == {"cpu", "cuda"}


def test_convert_then_load_without_folding(run, tiny, tmp_path):
    out_file = tmp_path / "k.gguf"
    code, out, _ = run("convert", tiny, "-o", out_file, "--cache", "k")
    assert code == 0 and "k" in out
    arguments = ("-p", PROMPT, "-n", 9, "--temp", 0, "--ignore-eos", "--cache-type", "f32")
    expected = run("generate", tiny, *arguments)[1]
    code, out, err = run("generate", out_file, *arguments, "-v")
    assert (code, out) == (0, expected)
    assert "cache k f32" in err and "folding" not in err
    report = json.loads(
        run("convert", tiny, "-o", out_file, "--force", "--cache", "k", "--json", "--calibration", "none")[1]
    )
    assert report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_convert_leaves_nothing(tmp_path, number):
    big = write_tiny(tmp_path / "big.gguf", d=512, n_layers=24)
    process = command("convert", big, "-o", tmp_path / "k.gguf", "--cache", "k", "--calibration", "none")
    while process.poll() is None and not list(tmp_path.glob(".k.gguf.*")):
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (128 + number, b"", b"")
    assert os.listdir(tmp_path) == ["big.gguf"]
