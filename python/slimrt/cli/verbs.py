"""The verbs: a line of help and examples for each. Their modules, slimrt.cli.NAME, are imported when used."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    help: str
    examples: tuple[str, ...]


VERBS = {
    "generate": Verb(
        "continue a text",
        (
            'slimrt generate model.gguf -p "Once upon a time" -n 200',
            "slimrt generate model.gguf -f prompt.txt --temp 0 --cache k+r:q8 -v",
            'slimrt generate -hf ggml-org/gemma-3-1b-it-GGUF -p "The sea" -p "The sky" --json',
        ),
    ),
    "chat": Verb(
        "chat in the terminal",
        ("slimrt chat model.gguf", "slimrt chat model.gguf --system 'Answer in one sentence.' --temp 0.3"),
    ),
    "serve": Verb(
        "an HTTP server with OpenAI's API, for many clients at once",
        (
            "slimrt serve model.gguf --parallel 8 -c 8192",
            "slimrt serve model.gguf --host 0.0.0.0 --api-key-file keys.txt --cache k+r:q8",
        ),
    ),
    "transcribe": Verb(
        "speech to text, subtitles or JSON, with Whisper and Moonshine; several sounds are one batch",
        (
            "slimrt transcribe whisper.gguf talk.wav",
            "slimrt transcribe whisper.gguf a.wav b.mp3 --format srt -o subtitles/",
            "slimrt transcribe ggml-base.en.bin talk.wav --num-beams 5 --skip-silence",
        ),
    ),
    "translate": Verb(
        "translate, with T5, NLLB, Marian and their kin; several lines are one batch",
        (
            'slimrt translate t5.gguf -p "A house." --source English --target German',
            "slimrt translate nllb.gguf -f lines.txt --source eng_Latn --target deu_Latn",
        ),
    ),
    "text2text": Verb(
        "text to text, with T5, BART and their kin; several lines are one batch",
        ('slimrt text2text t5.gguf -p "summarize: ..."', "slimrt text2text t5.gguf -f lines.txt --json"),
    ),
    "forecast": Verb(
        "forecast time series with Chronos, Chronos-Bolt and Chronos-2: CSV in, quantiles out; several columns are one "
        "batch",
        (
            "slimrt forecast chronos.gguf sales.csv -n 24",
            "slimrt forecast chronos.gguf sales.csv --column north --column south --quantiles 0.1 0.5 0.9 -o next.csv",
            "slimrt forecast chronos-2.gguf sales.csv --column north --column south --joint",
        ),
    ),
    "convert": Verb(
        "write a GGUF file, quantised or folded for a cache mode, with a report for each layer",
        (
            "slimrt convert model/ -o model.gguf --outtype q4_k_m",
            "slimrt convert model.gguf -o small.gguf --cache auto --target-error 1%",
            "slimrt convert model.gguf -o low.gguf --cache lowrank --bits 2,4 --verify",
        ),
    ),
    "imatrix": Verb(
        "measure on a text what each weight is multiplied by, for slimrt convert --imatrix",
        (
            "slimrt imatrix model-f16.gguf text.txt -o imatrix.gguf",
            "slimrt convert model-f16.gguf --outtype q4_k_m --imatrix imatrix.gguf -o model.gguf",
        ),
    ),
    "inspect": Verb(
        "metadata, tensors, and which cache modes a model can use, with the reason against each of the others",
        ("slimrt inspect model.gguf", "slimrt inspect model.gguf --spectrum spectrum.png"),
    ),
    "plan": Verb(
        "memory of weights, cache and scratch in every mode; exit code 0 if the requested one fits and is allowed",
        ("slimrt plan model.gguf -c 32768", "slimrt plan model.gguf -c 8192 --parallel 4 --memory-limit 6GiB"),
    ),
    "perplexity": Verb(
        "perplexity of a text, or with --compare of several caches: KL divergence from kv f32, and bytes",
        (
            "slimrt perplexity model.gguf text.txt",
            "slimrt perplexity model.gguf text.txt --compare kv:q8 k:f16 k+r:q8 --plot front.png",
        ),
    ),
    "bench": Verb(
        "speed of prefill and decode at several depths, of one or several caches in turns, beside the read bandwidth",
        (
            "slimrt bench model.gguf",
            "slimrt bench model.gguf -d 0 4096 --compare kv:f16 k:f16 --format csv -o speed.csv",
        ),
    ),
    "cache": Verb(
        "list or clear slimrt's own files: converted models, and measurements of this machine",
        ("slimrt cache list", "slimrt cache clear SmolLM2-1.7B --yes"),
    ),
    "completion": Verb(
        "the completion script for bash, zsh or fish",
        (
            "slimrt completion bash > ~/.local/share/bash-completion/completions/slimrt",
            "slimrt completion zsh > ~/.zfunc/_slimrt",
            "slimrt completion fish > ~/.config/fish/completions/slimrt.fish",
        ),
    ),
    "man": Verb("the manual page of all verbs and flags", ("slimrt man | man -l -", "slimrt man > slimrt.1")),
    "doctor": Verb(
        "CPU features, cores, memory bandwidth and access, versions, extras", ("slimrt doctor", "slimrt doctor --tune")
    ),
}
