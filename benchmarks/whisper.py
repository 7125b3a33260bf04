"""Whisper's decoding in cross-attention modes e and kv beside CTranslate2 and Hugging Face, interleaved in one run.

    python benchmarks/whisper.py --batches 1 8 64 --turns 3 --json out.json

Weights are random, in the shape of Whisper base unless --shape says another; what is decoded means nothing, and takes
as long. Every contestant is a process of its own that encodes a clip, then decodes that many copies of its output; they
take turns, with the pure-read control after each. First token: from the encoder's output on, with each layer's K and V
of it where they are stored.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import machine
import numpy as np

PROMPT, STEPS = [50258, 50259, 50359, 50363], 24
END = 50257
SHAPES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}  # d_model, layers of each half, heads
CACHE = Path(os.environ.get("SLIMRT_BENCH_MODELS", "bench-models"))
Figures = dict[str, float]


def mel(n: int) -> np.ndarray:
    """Features of n clips, [n, 80, 3000] float32."""
    return np.random.default_rng(0).standard_normal((n, 80, 3000), np.float32)


def make(shape: str) -> Path:
    """The models of a shape in every engine's format, made once; needs torch, transformers and ctranslate2."""
    folder = CACHE / f"whisper-{shape}"
    if (folder / "done").exists():
        return folder
    import ctranslate2
    import torch
    import transformers

    import slimrt
    from slimrt.modelfile.hf.vocabulary_whisper import special_tokens

    torch.manual_seed(0)
    d, layers, heads = SHAPES[shape]
    config = transformers.WhisperConfig(
        vocab_size=51865, d_model=d, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * d, decoder_ffn_dim=4 * d,
    )  # fmt: skip
    source = folder / "hf"
    transformers.WhisperForConditionalGeneration(config).save_pretrained(source)
    (source / "tokenizer.json").unlink(missing_ok=True)
    for type in ("f32", "q8_0"):
        outtype = None if type == "f32" else type
        slimrt.convert(source, folder / f"{type}.gguf", outtype=outtype, progress=False)
    words = {word: i for i, word in enumerate([f"w{i}" for i in range(END)])}
    words |= {word: END + i for i, word in enumerate(special_tokens(END, config.vocab_size))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<|endoftext|>"},
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for type in ("int8", "float32"):
        converter = ctranslate2.converters.TransformersConverter(str(source))
        converter.convert(str(folder / f"ct2-{type}"), quantization=type, force=True)
    (folder / "done").touch()
    return folder


def slimrt_turn(folder: Path, weights: str, cross: str, cross_type: str, batch: int, threads: int) -> Figures:
    from slimrt import _core

    engine = _core.Engine(
        str(folder / f"{weights}.gguf"), n_ctx=448, n_seqs=batch, n_threads=threads, cross=cross, cross_type=cross_type,
        cache="kv", cache_type_k="f16", cache_type_v="f16",
    )  # fmt: skip
    sequences = [engine.new_sequence() for _ in range(batch)]
    clip = np.ascontiguousarray(mel(1)[0].T)
    spare = engine.new_sequence()
    start = time.perf_counter()
    (states,) = engine.encode([(spare, clip)], states=True)
    encode = time.perf_counter() - start
    engine.free_sequence(spare)
    encoded = time.perf_counter()
    engine.encode([(s, states) for s in sequences], encoded=True)
    prompt = np.array(PROMPT, np.int32)
    logits = engine.append([(s, prompt) for s in sequences])
    first = time.perf_counter()
    for _ in range(STEPS):
        logits[:, END] = -np.inf
        tokens = logits.argmax(1).astype(np.int32)
        logits = engine.append([(s, tokens[i : i + 1]) for i, s in enumerate(sequences)])
    done = time.perf_counter()
    rows = engine.info()["cross"]["bytes_per_row"]
    return {
        "encode": encode, "first": first - encoded, "step": (done - first) / STEPS,
        "cross_mib": batch * 1500 * rows / 2**20,
    }  # fmt: skip


def float32_kv_mib(folder: Path, batch: int) -> float:
    """What K and V of every decoder layer take in float32, in MiB."""
    d, layers, _ = SHAPES[folder.name.removeprefix("whisper-")]
    return batch * 1500 * 2 * d * layers * 4 / 2**20


def ctranslate2_turn(folder: Path, type: str, batch: int, threads: int) -> Figures:
    import ctranslate2

    model = ctranslate2.models.Whisper(str(folder / f"ct2-{type}"), compute_type=type, intra_threads=threads)
    start = time.perf_counter()
    states = np.asarray(model.encode(ctranslate2.StorageView.from_array(mel(1))))
    encode = time.perf_counter() - start
    states = ctranslate2.StorageView.from_array(np.repeat(states, batch, 0))

    def decode(n: int) -> tuple[float, int]:
        begin = time.perf_counter()
        out = model.generate(
            states, [PROMPT] * batch, beam_size=1, max_length=n, suppress_blank=False, suppress_tokens=[END]
        )
        assert len(out) == batch
        return time.perf_counter() - begin, len(out[0].sequences_ids[0])

    short, n_short = decode(4)  # one token
    long, n_long = decode(2 * STEPS)
    return {
        "encode": encode, "first": short, "step": (long - short) / (n_long - n_short),
        "cross_mib": float32_kv_mib(folder, batch),
    }  # fmt: skip


def hugging_face_turn(folder: Path, batch: int, threads: int) -> Figures:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder / "hf").eval()
    with torch.inference_mode():
        start = time.perf_counter()
        states = model.model.encoder(torch.from_numpy(mel(1)))
        encode = time.perf_counter() - start
        states.last_hidden_state = states.last_hidden_state.repeat(batch, 1, 1)
        encoded = time.perf_counter()
        out = model(encoder_outputs=states, decoder_input_ids=torch.tensor([PROMPT] * batch), use_cache=True)
        first = time.perf_counter()
        for _ in range(STEPS):
            tokens = out.logits[:, -1:].argmax(-1)
            out = model(
                encoder_outputs=states, decoder_input_ids=tokens, past_key_values=out.past_key_values, use_cache=True
            )
        done = time.perf_counter()
    return {
        "encode": encode, "first": first - encoded, "step": (done - first) / STEPS,
        "cross_mib": float32_kv_mib(folder, batch),
    }  # fmt: skip


def turn(contestant: str, shape: str, batch: int, threads: int) -> Figures:
    """slimrt:WEIGHTS:CROSS:TYPE, ctranslate2:TYPE or huggingface, in this process."""
    folder, (engine, *settings) = CACHE / f"whisper-{shape}", contestant.split(":")
    if engine == "slimrt":
        return slimrt_turn(folder, *settings, batch, threads)
    if engine == "ctranslate2":
        return ctranslate2_turn(folder, *settings, batch, threads)
    return hugging_face_turn(folder, batch, threads)


def in_a_process(contestant: str, args: argparse.Namespace, batch: int) -> Figures:
    command = [sys.executable, __file__, "--one", contestant, "--shape", args.shape, "--batches", str(batch)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    command += ["--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{contestant}, batch {batch}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, Any]) -> None:
    print("| batch | contestant | encode s/clip | first token ms | step ms | tok/s | cross MiB |")
    print("|---|---|---|---|---|---|---|")
    for batch, contestants in results["batches"].items():
        for name, turns in contestants.items():
            of = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            print(
                f"| {batch} | {name} | {of['encode']:.2f} | {1e3 * of['first']:.0f} | {1e3 * of['step']:.1f} "
                f"| {int(batch) / of['step']:.0f} | {of['cross_mib']:.0f} |"
            )
    print(f"\npure read: {statistics.median(results['read_gbs']):.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contestants", nargs="+", default=[
        "slimrt:q8_0:e:f16", "slimrt:q8_0:e:q8", "slimrt:q8_0:kv:f16", "slimrt:q8_0:kv:q8", "slimrt:f32:e:f32",
        "ctranslate2:int8", "ctranslate2:float32", "huggingface",
    ])  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(turn(args.one, args.shape, args.batches[0], args.threads)))
        return
    make(args.shape)
    from slimrt import _core

    results: dict[str, Any] = machine.describe() | {
        "date": datetime.now().isoformat(" ", "seconds"),
        "shape": args.shape,
    }
    results |= {"batches": {str(b): {c: [] for c in args.contestants} for b in args.batches}, "read_gbs": []}
    for _ in range(args.turns):
        for batch in args.batches:
            for contestant in args.contestants:
                results["batches"][str(batch)][contestant].append(in_a_process(contestant, args, batch))
                results["read_gbs"].append(_core.read_bandwidth(args.threads))
    table(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
