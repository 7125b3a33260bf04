"""Translation beside CTranslate2 and Hugging Face, interleaved in one run.

    python benchmarks/translate.py --shape opus-mt --batches 1 8 --beams 1 4 --json out.json

Weights are random, in BART's layout and the shape of opus-mt or NLLB-600M; what comes out means nothing, and takes as
long.
Every contestant is a process of its own that loads its model, translates once to warm up, then translates a batch of
sources of as many tokens as it writes; they take turns, with the pure-read control after each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import machine
import numpy as np

SHAPES = {"opus-mt": (512, 6, 8, 2048, 58101), "nllb-600m": (1024, 12, 16, 4096, 256206)}  # d, layers, heads, ff, vocab
N, FIRST_WORD = 32, 4  # tokens of a source and of its translation; ids before are special
CACHE = Path(os.environ.get("SLIMRT_BENCH_MODELS", "bench-models"))


def make(shape: str) -> Path:
    """The models of a shape in every engine's format, made once; needs torch, transformers and ctranslate2."""
    folder = CACHE / f"translate-{shape}"
    if (folder / "done").exists():
        return folder
    import ctranslate2
    import torch
    import transformers

    import slimrt

    torch.manual_seed(0)
    d, layers, heads, ff, n_vocab = SHAPES[shape]
    config = transformers.BartConfig(
        vocab_size=n_vocab, d_model=d, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=ff, decoder_ffn_dim=ff, forced_eos_token_id=None,
        normalize_before=False, normalize_embedding=True,  # which CTranslate2 asks for
    )  # fmt: skip
    source = folder / "hf"
    transformers.BartForConditionalGeneration(config).save_pretrained(source)
    (source / "tokenizer.json").unlink(missing_ok=True)
    for outtype in ("f32", "q8_0"):
        slimrt.convert(source, folder / f"{outtype}.gguf", outtype=outtype, progress=False)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(FIRST_WORD, n_vocab))])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), special, strict=True))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    for kind in ("int8", "float32"):
        converter = ctranslate2.converters.TransformersConverter(str(source))
        converter.convert(str(folder / f"ct2-{kind}"), quantization=kind, force=True)
    (folder / "done").touch()
    return folder


def sources(shape: str, batch: int) -> list[list[int]]:
    """Ids of texts, [batch][N]."""
    return np.random.default_rng(0).integers(FIRST_WORD, SHAPES[shape][4], (batch, N)).tolist()


def slimrt_turn(folder: Path, texts: list[list[int]], beams: int, threads: int, kind: str, cross: str) -> Callable:
    import slimrt

    model = slimrt.Model(
        folder / f"{kind}.gguf", n_ctx=2 * N, n_source=N, n_seqs=len(texts) * beams, n_threads=threads, cross=cross,
        progress=False,
    )  # fmt: skip
    return lambda: model.text2text(texts, max_tokens=N, ignore_eos=True, num_beams=beams)


def ctranslate2_turn(folder: Path, texts: list[list[int]], beams: int, threads: int, kind: str) -> Callable:
    import ctranslate2

    model = ctranslate2.Translator(str(folder / f"ct2-{kind}"), compute_type=kind, intra_threads=threads)
    words = [[f"w{id}" for id in text] for text in texts]
    return lambda: model.translate_batch(
        words, beam_size=beams, max_decoding_length=N, min_decoding_length=N, max_batch_size=len(texts)
    )


def huggingface_turn(folder: Path, texts: list[list[int]], beams: int, threads: int) -> Callable:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.BartForConditionalGeneration.from_pretrained(folder / "hf").eval()
    ids = torch.tensor(texts)
    return lambda: model.generate(ids, max_new_tokens=N, min_new_tokens=N, num_beams=beams, do_sample=False)


TURNS = {"slimrt": slimrt_turn, "ctranslate2": ctranslate2_turn, "huggingface": huggingface_turn}


def turn(contestant: str, shape: str, batch: int, beams: int, threads: int) -> float:
    """Seconds that a translation of a batch takes: ENGINE:SETTINGS, in this process."""
    engine, *settings = contestant.split(":")
    run = TURNS[engine](CACHE / f"translate-{shape}", sources(shape, batch), beams, threads, *settings)
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_a_process(contestant: str, args: argparse.Namespace, batch: int, beams: int) -> float:
    command = [sys.executable, __file__, "--one", contestant, "--shape", args.shape, "--batches", str(batch)]
    command += ["--beams", str(beams), "--threads", str(args.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{contestant}, batch {batch}: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="opus-mt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contestants", nargs="+", default=[
        "slimrt:q8_0:e", "slimrt:q8_0:kv", "slimrt:f32:e", "ctranslate2:int8", "ctranslate2:float32", "huggingface",
    ])  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(turn(args.one, args.shape, args.batches[0], args.beams[0], args.threads))
        return
    make(args.shape)
    from slimrt import _core

    cells = [(batch, beams) for batch in args.batches for beams in args.beams]
    results: dict[str, Any] = machine.describe() | {
        "date": datetime.now().isoformat(" ", "seconds"), "shape": args.shape, "tokens": N, "read_gbs": [],
        "seconds": {f"batch {batch}, {beams} beams": {one: [] for one in args.contestants} for batch, beams in cells},
    }  # fmt: skip
    for _ in range(args.turns):
        for batch, beams in cells:
            for one in args.contestants:
                seconds = in_a_process(one, args, batch, beams)
                results["seconds"][f"batch {batch}, {beams} beams"][one].append(seconds)
                results["read_gbs"].append(_core.read_bandwidth(args.threads))
    print("| batch | beams | contestant | ms | tokens/s |\n|---|---|---|---|---|")
    for batch, beams in cells:
        for one, seconds in results["seconds"][f"batch {batch}, {beams} beams"].items():
            median = statistics.median(seconds)
            print(f"| {batch} | {beams} | {one} | {1e3 * median:.0f} | {batch * N / median:.0f} |")
    print(f"\npure read: {statistics.median(results['read_gbs']):.1f} GB/s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
