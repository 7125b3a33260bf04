# SPDX-License-Identifier: Apache-2.0
"""What people type who come from other programs: it does the same, or is refused by name with what to type."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

import slimrt
from conftest import PROMPT, TESTS
from slimrt.cli.command import verb_parser, whole_parser
from slimrt.cli.common import beside_model, model_name
from slimrt.cli.habits import HABITS, VERB_HABITS
from slimrt.cli.verbs import VERBS

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python alone, most of the time


def read(verb: str, *words: str):
    return verb_parser(verb).read(words)


@pytest.fixture(scope="module")
def parsers():
    return {verb: verb_parser(verb) for verb in VERBS}


def test_flags_of_llama_cpp_that_mean_the_same(run, tiny):
    theirs = ("-m", tiny, "-p", PROMPT, "--predict", 5, "-s", 7, "--temperature", 0.5, "--top_k", 5, "-t", 1, "-b", 64,
              "--ctx-size", 64, "-ctk", "F32", "-ctv", "f32", "--typical", 0.9, "-l", "9-100", "-fa", "on", "--jinja",
              "-no-cnv", "--no-warmup", "--mmap", "--no-context-shift", "--json")  # fmt: skip
    ours = (tiny, "-p", PROMPT, "-n", 5, "--seed", 7, "--temp", 0.5, "--top-k", 5, "-c", 64, "--cache", "kv:f32",
            "--typical-p", 0.9, "--logit-bias", "9=-100", "--json")  # fmt: skip
    (code, out, err), (_, expected, _) = run("generate", *theirs), run("generate", *ours)
    assert (code, err) == (0, "")
    got, wanted = json.loads(out), json.loads(expected)
    assert got["tokens"] == wanted["tokens"] and got["cache"] == wanted["cache"] and got["cache"]["types"][0] == "f32"


def test_values_of_llama_cpp_that_mean_left_out():
    args = read("generate", "m", "-s", "-1", "-t", "-1", "-ngl", "auto")
    assert (args.seed, args.threads, args.gpu_layers) == (None, None, None)
    assert [read("generate", "m", "-ngl", all).gpu_layers for all in ("all", "-1")] == [-1, -1]
    assert read("doctor", "-t", "-1").threads is read("imatrix", "m", "-o", "x", "-t", "-1").threads is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-c", "0"), "-c/--ctx: must be at least 1, got 0: left out it is the trained one, at most 4096"),
        (("-ngl", "-2"), "-ngl/--gpu-layers: must be at least -1, got -2"),
        (("-l", "5"), "such as 42=-1.5 or 42=-inf, got '5'"),  # it said: got ''
    ],
)
def test_values_that_are_refused_with_what_to_type(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        read("generate", "m", *words)
    assert said in capsys.readouterr().err


def test_cache_types_of_llama_cpp_are_told_apart(run, tiny):
    arguments = ("generate", tiny, "-p", PROMPT, "-n", 2, "--json")
    code, out, err = run(*arguments, "-ctk", "Q8_0", "-ctv", "q4_0")
    assert code == 0 and "q8_0 is q8 here" in err and "q4_0 is q4 here" in err
    ours = json.loads(run(*arguments, "-ctk", "q8", "-ctv", "q4")[1])
    assert json.loads(out)["cache"] == ours["cache"]
    assert run(*arguments, "-ctk", "q8_0", "-q")[2] == ""
    assert json.loads(run(*arguments, "--cache", "KV:Q8_0", "-q")[1])["cache"]["types"] == ["q8", "q8"]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.names[0])
def test_every_flag_in_the_table(parsers, habit, capsys):
    """It is refused with its advice where a verb lacks it, or taken with the values that change nothing."""
    used = 0
    for verb in habit.verbs or VERBS:
        parser = parsers[verb]
        for name in habit.names:
            if parser._action(name) is not None:
                continue
            used += 1
            wrong = (
                [[name], [name, "1"]] if habit.granted is None else [[name, "off"]] if len(habit.granted) > 1 else []
            )
            for words in wrong:
                with pytest.raises(SystemExit, match="2"):
                    parser.read(words)
                err = capsys.readouterr().err
                assert err.startswith("slimrt: error: ") and err.count("\n") == 1 and habit.advice in err
            for value in habit.granted or ():
                left = parser._plain([name, *([value] if value else []), "a.gguf"])
                assert left == ["a.gguf"]
    assert used, "every verb knows these flags by itself: the line is of no use"


def test_names_of_transformers(capsys):
    """ "True" after one is its value, "False" asks for what is not done: neither was taken for a text."""
    assert read("generate", "--stream", "true", "--do_sample", "True", "m").positional == "m"
    for verb in ("translate", "text2text"):
        for flag, advice in (("--stream", "printed when it is done"), ("--do-sample", "--temp 1 draws tokens")):
            with pytest.raises(SystemExit, match="2"):
                read(verb, "m", flag)
            assert advice in capsys.readouterr().err
    for words, said in (
        (("--do-sample", "False"), "unless --temp 0 asks for the likeliest"),
        (("--max_new_tokens", "4"), "-n N, most tokens to generate"),
        (("-o", "x"), "texts go to stdout: > FILE keeps them"),
    ):
        with pytest.raises(SystemExit, match="2"):
            read("generate", "m", *words)
        assert said in capsys.readouterr().err


def test_no_abbreviations_and_nothing_glued(run, tiny):
    for typed, said in (
        ("--no-disp", "there is no flag --no-disp"),
        ("--temprature", "did you mean --temperature?"),
        ("--sead", "did you mean --seed?"),
        ("-ffile.txt", "did you mean -f file.txt?"),
        ("-jkx", "there is no flag -jkx"),
    ):
        code, out, err = run("generate", tiny, "-p", PROMPT, typed)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    code, _, err = run("transcribe", tiny, "x.wav", "-n", 5)  # was taken for -ngl
    assert code == 2 and "there is no flag -n " in err


def test_what_may_be_glued_or_begin_with_a_dash():
    args = read("generate", "m", "-n5", "-vv", "-p", "-foo", "-p", "- a list", "-p", "a=b", "--stop=--x", "--top_p=0.5")
    assert (args.n_predict, args.verbose, args.prompt) == (5, 2, ["-foo", "- a list", "a=b"])
    assert args.stop == ["--x"] and args.top_p == 0.5
    assert read("perplexity", "m", "--", "-x y").text == ["-x y"]
    with pytest.raises(SystemExit):
        read("generate", "m", "-p", "-n", "5")  # the text is missing


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "m", "--save-session", ""), "--save-session: must not be empty"),
        (("generate", "m", "--load-session", ""), "--load-session: must not be empty"),
        (("generate", "m", "-f", ""), "-f/--file: must not be empty"),
        (("generate", "m", "-p", "a", "--grammar", ""), "--grammar: must not be empty"),
        (("chat", "m", "--save", ""), "--save: must not be empty"),
        (("transcribe", "m", "a.wav", "-o", ""), "-o/--output: must not be empty"),
        (("bench", "m", "-o", "-"), "leave -o - out"),
        (("convert", "m", "-o", "-"), "-o/--output: must be the name of a file"),
        (("imatrix", "m", "-o", "-"), "-o/--output: must be the name of a file"),
        (("generate", "m", "--save-session", "-"), "--save-session: must be the name of a file"),
        (("forecast", "m", "a.csv", "-o", "-"), "leave -o - out"),
    ],
)
def test_names_of_files_that_are_none(run, tmp_path, monkeypatch, words, said):
    """As of `--save-session "$UNSET"`: the context was not saved, and nothing said so. `-o -` wrote a file called -."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (2, "") and said in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("text2text", "tale-t5.gguf", "-f", "-"), ("text2text", "tale-t5.gguf")])
def test_a_dash_is_stdin(run, monkeypatch, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"lantern\n")))
    code, out, _ = run(words[0], TESTS.parent / "models" / words[1], *words[2:])
    assert (code, out) == (0, "nretnal\n")


def test_a_dash_is_stdin_for_texts_and_series(run, monkeypatch, tiny):
    for data, words in (
        (b"a text of some words", ("perplexity", tiny, "-")),
        (b"a text of some words", ("perplexity", tiny, "-f", "-")),
        (b"a text", ("generate", tiny, "-n", 1, "-f", "-")),
        (b"1\n2\n3\n", ("forecast", TESTS.parent / "models" / "tale-chronos.gguf", "-", "-n", 1)),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code, out, err = run(*words)
        assert code == 0 and out, err


def test_arguments_after_flags():
    args = read("transcribe", "-m", "m.gguf", "a.wav", "--format", "srt", "b.wav", "-o", "x/", "c.wav")
    assert (args.positional, args.audio, args.output) == ("a.wav", ["b.wav", "c.wav"], "x/")
    args = read("inspect", "--spectrum", "--json", "m.gguf")
    assert (args.spectrum, args.positional) == ("", "m.gguf")


@pytest.mark.parametrize("words", [("kv:f16", "k:f16"), ("kv:f16,k:f16",), ("kv:f16,", "k:f16"), ("kv:f16", "K:F16")])
def test_lists_take_blanks_and_commas(tmp_path, words):
    text = tmp_path / "text"
    text.write_text("a text")
    args = read("perplexity", "m", "--compare", *words, str(text))
    assert args.compare == "kv:f16,k:f16" and args.text == [str(text)]
    assert read("perplexity", "m", "--compare", *words, "text.txt").text == ["text.txt"]
    assert read("bench", "m", "--compare", *words).compare == "kv:f16,k:f16"
    several = ("kv:f16", "kivi:q4/q2", "lowrank:q2/q3@0.375+q8*64+predict")
    args = read("perplexity", "m", "--compare", *several, "x:/folder/text.txt")
    assert args.compare == ",".join(several) and args.text == ["x:/folder/text.txt"]


def test_other_lists():
    assert read("bench", "m", "-d", "0", "512,4096").depths == "0,512,4096"
    assert read("forecast", "m", "--quantiles", "0.1", "0.5", "0.9", "a.csv").quantiles == (0.1, 0.5, 0.9)
    assert read("transcribe", "m", "--temp", "0", "0.2", "a.wav").temp == (0.0, 0.2)
    assert read("convert", "m", "-o", "x", "--bits", "2", "4").bits == [2, 4]
    assert read("convert", "m", "-o", "x", "--cache-type", "f16", "Q8").cache_type == "f16,q8"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which verb? generate, chat"),
        (("genrate",), "did you mean slimrt generate?"),
        (("quantiz",), "did you mean slimrt convert"),
        (("fly",), "there is no verb fly; there are generate"),
        (("-m", "model.gguf"), "the verb comes first: slimrt generate -m"),
        ((str(TESTS),), "the verb comes first"),
        *(((word,), f"there is no verb {word}; type: {advice}") for word, advice in VERB_HABITS.items()),
    ],
)
def test_verbs(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err


def test_what_is_advised_exists():
    commands = re.findall(r"slimrt ([^,;]+)", ", ".join(VERB_HABITS.values()))
    for words in map(str.split, set(commands)):
        if words[0] in VERBS:
            read(*words)


@pytest.mark.parametrize("example", [example for verb in VERBS.values() for example in verb.examples])
def test_examples_of_help_are_command_lines(example):
    words = shlex.split(example.partition(" > ")[0].partition(" | ")[0])
    assert words[0] == "slimrt"
    read(*words[1:])


def test_help_has_groups_and_examples(run):
    code, out, err = run("generate", "--help")
    assert (code, err) == (0, "") and out.startswith("usage: slimrt generate MODEL [flags]\n")
    for title in ("model:", "sampling:", "machine and memory:", "cache:", "examples:"):
        assert f"\n{title}\n" in out
    assert "-c, --ctx, --ctx-size N" in out and "--n-source" not in out
    assert "--n-source" in run("translate", "--help")[1]
    assert "usage: slimrt convert MODEL -o OUT [flags]\n" in run("convert", "--help")[1]


@pytest.mark.parametrize(
    ("verb", "title", "flags"),
    [
        ("generate", "structured output", {"--json-schema", "--grammar", "--regex", "--choice"}),
        ("chat", "structured output", {"--json-schema", "--grammar", "--regex", "--choice"}),
        ("translate", "output and messages", {"--json", "--verbose", "--quiet", "--no-progress"}),
        ("convert", "cache mode lowrank", {"--bits", "--share", "--sinks", "--group", "--heads", "--predict"}),
    ],
)
def test_a_group_of_help_has_its_own_flags_alone(run, verb, title, flags):
    group = re.search(rf"\n{title}[^\n]*:\n(.*?)\n\n", run(verb, "--help")[1], re.DOTALL)
    listed = re.findall(r"^  (-\S.*?)(?:  |$)", group[1], re.MULTILINE)
    assert {next(word for word in re.findall(r"[^\s,]+", line) if word.startswith("--")) for line in listed} == flags


def test_twins_mean_the_same_in_every_verb(monkeypatch):
    """A variable that is meant for one verb must be right for another."""
    from slimrt.cli.flags import Adder

    kinds: dict[str, set] = {}
    monkeypatch.setattr(Adder, "_take_twin", lambda self, action, name: kinds.setdefault(name, set()).add(
        (getattr(action.type, "__qualname__", None), str(action.choices), action.nargs)))  # fmt: skip
    for verb in VERBS:
        verb_parser(verb)
    assert {name for name, found in kinds.items() if len(found) > 1} == set()
    assert not kinds.keys() & {"--output", "--prompt", "--file", "--model", "--compare", "--plot", "--save-session"}


def test_a_twin_of_the_model_does_not_move_arguments(monkeypatch):
    def split(verb, *words):
        args = read(verb, *words)
        given = {"transcribe": "audio", "forecast": "csv", "perplexity": "text"}[verb]
        return beside_model(args, getattr(args, given)), args

    for verb, given in (("transcribe", "a.wav"), ("forecast", "a.csv"), ("perplexity", "a.txt")):
        monkeypatch.setenv("SLIMRT_MODEL", "env.gguf")
        inputs, args = split(verb, "typed.gguf", given)
        assert (inputs, model_name(args)) == ([given], "typed.gguf")
        inputs, args = split(verb, given)
        assert (inputs, model_name(args)) == ([given], "env.gguf")
        inputs, args = split(verb, given, "-m", "typed.gguf")
        assert (inputs, model_name(args)) == ([given], "typed.gguf")
        inputs, args = split(verb, "typed.gguf")  # the rest comes from a pipe
        assert (inputs, model_name(args)) == ([], "typed.gguf")
        monkeypatch.delenv("SLIMRT_MODEL")
        inputs, args = split(verb, "typed", given)
        assert (inputs, model_name(args)) == ([given], "typed")
    assert split("transcribe", "a.wav", "b.wav", "-hf", "org/repo")[0] == ["a.wav", "b.wav"]


def test_twins_of_what_a_command_reads_or_writes_are_none(run, tiny, tmp_path, monkeypatch):
    expected = run("generate", tiny, "-p", PROMPT, "-n", 3, "--temp", 0)
    for name in ("FILE", "PROMPT", "SAVE_SESSION", "OUTPUT", "COMPARE"):
        monkeypatch.setenv(f"SLIMRT_{name}", "x")
    monkeypatch.chdir(tmp_path)
    assert run("generate", tiny, "-p", PROMPT, "-n", 3, "--temp", 0) == expected
    monkeypatch.setenv("SLIMRT_CACHE", "k")  # how models are run, not what convert writes
    assert run("convert", tiny, "-o", "out.gguf", "--calibration", "none")[0] == 0
    assert json.loads(run("inspect", "out.gguf", "--json")[1])["cache"] is None


def test_a_model_of_the_hub():
    assert model_name(read("generate", "-hf", "org/repo")) == "hf://org/repo"
    assert model_name(read("plan", "--hf-repo", "org/repo:Q8_0")) == "hf://org/repo:Q8_0"
    assert model_name(read("convert", "-hf", "org/repo:Q8_0", "-hff", "a.gguf", "-o", "x")) == "hf://org/repo:a.gguf"


def test_several_prompts_are_a_batch(run, tiny, tmp_path):
    arguments = ("generate", tiny, "-n", 5, "--temp", 0, "--ignore-eos")
    alone = [run(*arguments, "-p", prompt) for prompt in (PROMPT, "a")]
    code, out, err = run(*arguments, "-p", PROMPT, "-p", "a", "-v")
    assert code == 0 and out == alone[0][1] + "\n" + alone[1][1] and "context 32 of 256 trained x 2" in err
    results = json.loads(run(*arguments, "-p", PROMPT, "-p", "a", "-np", 1, "--json")[1])
    assert [one["prompt"] for one in results] == [PROMPT, "a"]
    assert [one["prompt"] + one["text"] + "\n" for one in results] == [out for _, out, _ in alone]
    assert "full in 2 of 2 texts" in run(*arguments, "-p", PROMPT, "-p", "a", "-c", 32, "-n", 99)[2]
    code, _, err = run(*arguments, "-p", PROMPT, "-p", "a", "--save-session", tmp_path / "s")
    assert code == 2 and "give one -p" in err


def test_escapes(run, tiny):
    arguments = ("generate", tiny, "-n", 0, "-p", r"a\nb\\n\q")
    assert run(*arguments)[1] == "a\\nb\\\\n\\q\n"
    assert run(*arguments, "-e")[1] == "a\nb\\n\\q\n"


def test_percentages_and_capitals(run, tiny, tmp_path):
    assert read("convert", "m", "-o", "x", "--target-error", "2%").target_error == 0.02
    assert read("plan", "m", "--sparse-threshold", "2%").sparse_threshold == 0.02
    with pytest.raises(SystemExit, match="2"):
        read("convert", "m", "-o", "x", "--target-error", "200%")
    out = tmp_path / "q8.gguf"
    assert run("convert", tiny, "-o", out, "--outtype", "Q8_0")[0] == 0
    types = {tensor["name"]: tensor["type"] for tensor in json.loads(run("inspect", out, "--json")[1])["tensors"]}
    assert types["blk.0.attn_q.weight"] == "q8_0"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run, shell):
    pytest.importorskip("shtab")
    code, script, err = run("completion", shell)
    assert (code, err) == (0, "")
    for word in ("generate", "cache-type" if shell == "fish" else "--cache-type", "inspect"):
        assert word in script
    assert " -s hf" not in script  # fish calls -hf an old name: -o hf
    try:
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""
    except FileNotFoundError:
        pytest.skip(f"there is no {shell} here")


def test_the_manual(run):
    pytest.importorskip("argparse_manpage")
    code, page, err = run("man")
    assert (code, err) == (0, "") and page.startswith(".TH SLIMRT")
    flags = {one for action in whole_parser()._actions for one in action.option_strings}
    for name in (*flags - {"-h", "--help"}, "--cache-type", "--save-session", "--target-error"):
        assert name.replace("-", r"\-") in page


@pytest.mark.parametrize("verb", ["completion", "man"])
def test_without_the_extra(run, monkeypatch, verb):
    for module in ("shtab", "argparse_manpage", "argparse_manpage.manpage"):
        monkeypatch.setitem(sys.modules, module, None)
    code, out, err = run(verb, *(["bash"] if verb == "completion" else []))
    assert (code, out) == (1, "") and "pip install 'slimrt[shell]'" in err


@pytest.mark.unemulated
def test_the_version_takes_no_time():
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "slimrt", "--version"], check=True, capture_output=True)
    after = getrusage(RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.3
    listed = [sys.executable, "-X", "importtime", "-m", "slimrt", "--version"]
    seen = subprocess.run(listed, capture_output=True, text=True).stderr
    assert not {"numpy", "slimrt.model", "slimrt.cli.generate"} & {line.split()[-1] for line in seen.splitlines()}


def test_nothing_is_imported_before_ctrl_c_is_expected():
    """By the module of the command, whose main() expects it: what is there before is Python's own."""
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        before = set(sys.modules)
        import slimrt.cli
        print(sorted(set(sys.modules) - before - {"__future__"}))"""
    folder = Path(slimrt.__file__).parents[1]
    seen = subprocess.run([sys.executable, "-S", "-c", code, folder], capture_output=True, text=True)
    assert seen.stdout == "['slimrt', 'slimrt.cli']\n"


@pytest.mark.parametrize("module", ["slimrt.cli.command", "slimrt.model", "slimrt._core"])
def test_ctrl_c_while_modules_are_imported(module):
    code = f"""if True:
        import sys
        class Interrupt:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupt())
        from slimrt.cli import main
        sys.exit(main(["plan", "x"]))"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")
