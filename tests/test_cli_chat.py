# SPDX-License-Identifier: Apache-2.0
"""slimrt chat: its commands, messages of several lines, files, and a terminal that is interrupted."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slimrt
import tool_templates
from test_cli import typed  # noqa: F401  a fixture
from tiny_model import write_tiny

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time


@pytest.fixture
def chat(run, tiny, typed, tmp_path, monkeypatch):  # noqa: F811
    """chat(what is typed, *flags) -> exit code, answers, stderr; over a pipe."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(text, *flags):
        typed(text)
        code, out, err = run("chat", tiny, "--temp", 0, "-n", 6, "--json", *flags)
        return code, [json.loads(line) for line in out.splitlines()], err

    return call


def user_messages(path):
    return [m["content"] for m in json.loads(Path(path).read_text()) if m["role"] == "user"]


# ---------------------------------------------------------------- what is entered
def test_messages_of_several_lines_and_with_a_slash(chat, tmp_path):
    saved = tmp_path / "chat.json"
    code, answers, _ = chat('"""one\n/exit \\\n two"""\nthree\\\n  four\n//five\n"""six"""\n', "--save", saved)
    assert code == 0 and len(answers) == 4
    assert user_messages(saved) == ["one\n/exit \\\n two", "three\n  four", "/five", "six"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/regenrate", r"command '/regenrate' .*did you mean '/regenerate'.*written //regenrate"),
        ("/exit now", "/exit takes nothing after it.*written //exit"),
        ("/save", "/save needs a FILE"),
        ("/regenerate", "there is no message to answer again"),
        ("/set top_q 1", r"option 'top_q' .*did you mean 'top_"),
        ("/set top_p 2", "top_p must lie in"),
        ("/set temp warm", "^slimrt: error: temperature must be a number, got 'warm'$"),
        ("/set max_tokens none", "^slimrt: error: max_tokens must be a whole number, got None$"),
        ('/set logit_bias {"a": 3}', "^slimrt: error: a token id in logit_bias must be a whole number, got 'a'$"),
        pytest.param(f"/set seed {'[' * 9999}", "^slimrt: error: seed must be a whole number, got '", id="deep"),
        ("/set num_beams 2", "num_beams: chat shows a text as it comes, and beam search chooses it at the end"),
        ("/set seed", r"/set seed needs a VALUE \(now None\)"),
        ("/load nowhere.json", "nowhere.json: No such file"),
        ("/load ~no-such-user/x", "~no-such-user/x: ~ stands for no home directory"),
        ('"""hello', 'the message that """ opened was not closed'),
    ],
)
def test_what_cannot_be_ends_a_pipe_with_one_line(chat, line, message):
    code, answers, err = chat(f"{line}\nhello\n")
    assert (code, answers) == (1, []) and re.search(message, err) and err.count("\n") == 1


def test_set_regenerate_and_system(chat, tmp_path):
    saved = tmp_path / "chat.json"
    lines = ["hello", "/set temp 5", "/set n 3", "/set", "/regenerate", "/regenerate", "/set seed none", "/system",
             "/system be kind", "/system", f"/save {saved}", "/system none", "/system"]  # fmt: skip
    code, answers, err = chat("\n".join(lines), "--seed", 1)
    assert code == 0
    first, second, third = answers
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == third["usage"]["prompt_tokens"]
    assert len(first["tokens"]) > len(second["tokens"]) and second["tokens"] != third["tokens"]  # seeds 1, 2 and 3
    assert "temperature 5\n" in err and "temperature 5, top_k 40" in err and "seed None" in err
    assert err.count("there is no system message") == 2 and "be kind\n" in err
    messages = json.loads(saved.read_text())
    assert messages[0] == {"role": "system", "content": "be kind"} and messages[2]["content"] == third["text"]
    assert len(messages) == 3


def test_a_seed_of_minus_one_is_new_when_answering_again(chat):
    again = [chat("/set temp 5\n/set seed -1\nhello\n/regenerate\n")[1][1]["tokens"] for _ in range(2)]
    assert again[0] != again[1]


def test_biases_of_tokens_are_set_as_json(chat):
    code, answers, err = chat('/set logit_bias {"5": 1000}\nhello\n')
    assert code == 0 and "logit_bias {5: 1000}\n" in err and set(answers[0]["tokens"]) == {5}


# ---------------------------------------------------------------- one message
def test_one_message(run, tiny, tmp_path):
    with slimrt.Model(tiny) as model:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        expected = model.chat(messages, seed=1, max_tokens=4).text
    (tmp_path / "p").write_text("hello\n")
    for flags in (("-p", "hello"), ("-f", tmp_path / "p")):
        assert run("chat", tiny, *flags, "-sys", "be brief", "--seed", 1, "-n", 4) == (0, expected + "\n", "")
    for flags, message in ((("-p", "a", "-f", "b"), "give -p or -f"), (("-p", " "), "is empty")):
        code, out, err = run("chat", tiny, *flags)
        assert (code, out) == (2, "") and message in err


def test_templates(run, tiny, tmp_path):
    flags = ("chat", tiny, "-p", "hello", "--seed", 1, "-n", 4)
    with slimrt.Model(tiny) as model:
        ids = {
            name: model.render_chat([{"role": "user", "content": "hello"}], chat_template=name)
            for name in ("chatml", None)
        }
        texts = {name: model.generate(prompt, seed=1, max_tokens=4).text + "\n" for name, prompt in ids.items()}
    assert run(*flags)[1] == texts[None] != texts["chatml"] == run(*flags, "--chat-template", "chatml")[1]
    (tmp_path / "t.jinja").write_text(
        "{% if f %}{{ raise_exception('f is ' ~ f) }}{% endif %}{{ messages[-1].content }}"
    )
    assert run(*flags, "--chat-template", tmp_path / "t.jinja")[0] == 0
    code, _, err = run(*flags, "--chat-template", tmp_path / "t.jinja", "--chat-template-kwargs", '{"f": 7}')
    assert code == 1 and "chat template: f is 7" in err
    code, _, err = run(*flags, "--chat-template", tmp_path / "t.jinja", "--system", "be brief")
    assert code == 1 and "leaves the system message out" in err
    code, _, err = run(*flags, "--chat-template", "chatlm")
    assert code == 1 and "did you mean 'chatml'?" in err
    for value, message in (("{", "not JSON"), ("[1]", "must be a JSON object")):
        code, _, err = run(*flags, "--chat-template-kwargs", value)
        assert code == 2 and message in err


# ---------------------------------------------------------------- files
def test_a_conversation_goes_on(chat, tmp_path):
    saved, other = tmp_path / "chat.json", tmp_path / "other.json"
    code, before, _ = chat("hello\nand now\n", "--save", saved)
    assert code == 0 and len(json.loads(saved.read_text())) == 4 and saved.stat().st_mode & 0o777 == 0o600
    code, _, err = chat("hello\n", "--save", saved)
    assert code == 1 and "--load" in err and len(json.loads(saved.read_text())) == 4
    code, _, err = chat("hello\n", "--load", saved, "--save", saved)
    assert code == 0 and "slimrt: 4 messages\n" in err and len(json.loads(saved.read_text())) == 6
    code, again, _ = chat(f"other\n/load {saved}\n/regenerate\n/save {saved}\n/save {other}\n")
    assert code == 0 and again[1]["usage"]["prompt_tokens"] > before[1]["usage"]["prompt_tokens"]
    assert len(json.loads(other.read_text())) == 6
    other.write_text('[{"role": "system", "content": "Be brief."}]')
    assert "slimrt: 1 messages\n" in chat("", "--load", other)[2]  # none to answer again
    other.write_text(saved.read_text())
    code, _, err = chat(f"hello\n/save {other}\n")
    assert code == 1 and "is not of this conversation" in err and len(json.loads(other.read_text())) == 6


def test_options_that_do_not_go_together(chat):
    """They are wrong usage, and not what every message is answered with."""
    code, answers, err = chat("hello\n", "--mirostat", 2, "--top-k", 5)
    assert (code, answers) == (2, []) and "top_k=5 does not go with mirostat=2" in err


def test_a_system_message_beside_a_conversation(chat, tmp_path):
    """What is typed takes the place of the file's; without it that one stays."""
    saved = tmp_path / "chat.json"
    for flags, systems in (
        (("--system", "Be brief."), ["Be brief."]),
        (("--load", saved), ["Be brief."]),
        (("--load", saved, "--system", "Rhyme."), ["Rhyme."]),
    ):
        assert chat("hello\n", *flags, "--save", saved)[0] == 0
        messages = json.loads(saved.read_text())
        assert [one["content"] for one in messages if one["role"] == "system"] == systems
    assert len(messages) == 7


@pytest.mark.parametrize("content", ["no", "[]", '[{"role": "user"}]', '{"a": 1}', "[" * 100000, "\xff"])
def test_no_conversation(chat, tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content.encode("latin-1"))
    code, _, err = chat("hello\n", "--load", tmp_path / "bad.json")
    assert code == 1 and "bad.json holds no conversation: " in err


def test_an_error_keeps_the_conversation(chat, tmp_path):
    code, answers, err = chat(f"hello\n{'a' * 300}\n")
    kept = re.search(r"the conversation is saved in (\S+);", err)
    assert code == 1 and len(answers) == 1 and "the prompt has" in err
    assert kept and kept[1].startswith(str(tmp_path / "state" / "slimrt")) and user_messages(kept[1]) == ["hello"]
    (tmp_path / "file").write_text("")
    assert chat(f"hello\n/save {tmp_path}/a.json\n{'a' * 300}\n")[2].count("kept") == 0  # it is saved


# ---------------------------------------------------------------- a terminal
def test_ctrl_c_before_an_answer_leaves_all_as_it_was(tiny, monkeypatch, capsys):
    """While the template is rendered, in prefill, and in a command."""
    from slimrt.cli import chat, conversation
    from slimrt.cli.chat_input import Entered

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    args = argparse.Namespace(system="", save=None, json=False, verbose=0, quiet=True, chat_template=None,
                              chat_template_kwargs=None, n_predict=5, single_turn=False)  # fmt: skip
    monkeypatch.setattr(conversation, "sampling_arguments", lambda _: {"temperature": 0.0, "stop": [], "seed": None})
    monkeypatch.setattr(conversation, "constraint_arguments", lambda _: {})
    steps = iter(["hello", "render", "prefill", "/save x", "bye"])
    with slimrt.Model(tiny) as model:
        talk = conversation.Conversation(model, args, interactive=True)

        class Typed:
            interactive = True

            def read(self):
                step = next(steps, None)
                monkeypatch.undo()
                where = {
                    "render": (model, "render_chat"),
                    "prefill": (slimrt.Stream, "__next__"),
                    "/save x": (talk, "save"),
                }
                if step in where:
                    monkeypatch.setattr(*where[step], interrupted)
                return step and Entered(step, command=step.startswith("/"))

        chat._converse(talk, Typed())
        assert [m["content"] for m in talk.messages[::2]] == ["hello", "bye"] and len(talk.messages) == 4
    assert capsys.readouterr().err.count("stopped; the conversation is as it was") == 3


# Its Ctrl-C is a signal then. Not preexec_fn, which may wait for ever for a lock that another thread of ours had.
_IN_A_TERMINAL = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "slimrt", "chat", *sys.argv[1:]])"""


class Terminal:
    """slimrt chat in a terminal of its own."""

    def __init__(self, *arguments, **environment):
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, *map(str, arguments)], stdin=side, stdout=side, stderr=side,
            env=os.environ | {"TERM": "dumb", "NO_COLOR": "1"} | environment, start_new_session=True,
        )  # fmt: skip
        os.close(side)
        self.seen = ""

    def read(self, until, seconds=60):
        """What appears, up to a pattern that must come."""
        end, text = time.monotonic() + seconds, ""
        while not re.search(until, text):
            ready = select.select([self.main], [], [], max(0.0, end - time.monotonic()))[0]
            try:
                data = os.read(self.main, 4096) if ready else b""
            except OSError:  # the other side is closed
                data = b""
            assert data, f"no {until!r} in {text!r}"
            text += data.decode(errors="replace").replace("\r\n", "\n")
        self.seen += text
        return text

    def type(self, text):
        os.write(self.main, text.encode())

    def type_at_the_prompt(self, key):
        self.wait_for_input()
        self.type(key)

    def signal(self, number):
        self.wait_for_input()
        self.process.send_signal(number)

    def wait_for_input(self):
        """A signal between a prompt and the wait for a key is heeded only when a key comes (CPython's readline)."""
        time.sleep(1.0)

    def end(self):
        """The exit code."""
        try:
            while select.select([self.main], [], [], 60)[0] and os.read(self.main, 4096):
                pass
        except OSError:
            pass
        return self.process.wait(60)


@pytest.fixture
def terminal(tiny, tmp_path):
    made = []

    def start(*flags):
        made.append(Terminal(tiny, "--temp", "0", *flags, XDG_STATE_HOME=str(tmp_path / "state")))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        os.close(one.main)


def test_ctrl_c_never_loses_a_conversation(terminal, tmp_path):
    """At the prompt, in a half typed line, while commands are wrong, in an answer without end; then EOF."""
    one, saved = terminal("-n", "5"), tmp_path / "chat.json"
    one.read("> $")
    one.type("hello\n")
    one.read("\n> $")
    one.type_at_the_prompt("\x03")
    assert "/exit or Ctrl-D leaves" in one.read("\n> $")
    one.type("half a line")
    one.type_at_the_prompt("\x03")
    one.read("leaves\n> $")
    one.type("/wrong\n")
    assert "slimrt: command '/wrong' is not supported" in one.read("\n> $")
    one.type("/save ~no-such-user/x\n")
    assert "slimrt: ~no-such-user/x: ~ stands for no home directory" in one.read("\n> $")
    one.type('"""two\n')
    one.read(r"\n\. $")
    one.type('lines"""\n')
    one.read("\n> $")
    one.type("/set n -1\n/set temperature 9\n/set ignore_eos true\n")  # the last is no sampling flag of chat
    one.read("option 'ignore_eos' is not supported[^\n]*\n> $")
    one.type("on and on\n")
    one.read(r"on and on\n[^\n]+")
    one.type("\x03")
    one.read("\n> $")
    one.type(f"/save {saved}\n/exit\n")
    assert one.end() == 0
    assert user_messages(saved) == ["hello", "two\nlines", "on and on"]


def test_a_signal_says_where_the_conversation_is(terminal, tmp_path):
    one = terminal("-n", "5")
    one.read("> $")
    one.type("hello\n")
    one.read("\n> $")
    one.signal(signal.SIGTERM)
    kept = re.search(r"is saved in\s(\S+);", one.read("continues it"))
    assert one.end() == 143 and kept and user_messages(kept[1].replace("\n", "")) == ["hello"]


def test_a_terminal_that_goes_away(terminal, tmp_path):
    one = terminal("-n", "5")
    one.read("> $")
    one.type("hello\n")
    one.read("\n> $")
    one.signal(signal.SIGHUP)
    assert one.end() == 129
    (kept,) = (tmp_path / "state" / "slimrt").iterdir()
    assert user_messages(kept) == ["hello"]


def test_a_single_turn_leaves_the_rest_unread(chat):
    code, answers, err = chat("one\ntwo\n", "--single-turn")
    assert (code, len(answers), err) == (0, 1, "")


def test_channels_are_told_apart(run, typed, tmp_path, monkeypatch):  # noqa: F811
    """gpt-oss': thoughts are shown as other models write them, and are no part of the answer."""
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    path, saved = write_tiny(tmp_path / "harmony.gguf", n_ctx=1024, controls=marks), tmp_path / "chat.json"
    with slimrt.Model(path) as model:
        script = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
        ids, stream = model.tokenize(script, add_special_tokens=False), slimrt.Model.stream

    def scripted(self, prompt, **options):
        def process(so_far, logits):
            logits[ids[len(so_far) - len(prompt)]] = 1e4
            return logits

        return stream(self, prompt, logits_processor=process, **options)

    monkeypatch.setattr(slimrt.Model, "stream", scripted)
    flags = ("--chat-template", tool_templates.HARMONY, "-n", 200, "--save", saved)
    typed("hello\nand you\n")
    code, out, err = run("chat", path, *flags)
    assert (code, out) == (0, "<think>hm</think>\n\nSo.\n" * 2), err
    assert json.loads(saved.read_text())[-1] == {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    typed("hello\n")
    code, out, _ = run("chat", path, *flags[:-2], "--json")
    assert code == 0 and json.loads(out)["text"] == "So."
