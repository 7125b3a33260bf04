"""Sounds of 30 s uploaded to slimrt serve, one after the other and all at once, in turns.

    python benchmarks/uploads.py --uploads 16 --turns 3 --json out.json

Whisper base's shape with random weights, q8_0, cross-attention mode e in q8. Position embeddings are such that a window
has `--tokens` tokens of text and then its end, as a real one has where about 3.5 words a second are spoken. Needs torch
and transformers, which make the model once. What steps take at batch 1 and N: `whisper.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import client
import machine
import numpy as np
import report
from servers import free_port
from whisper import CACHE, END, SHAPES

N_VOCAB, N_PROMPT, SECONDS, RATE = 51865, 3, 30, 16000
FLAGS = ("-c", "448", "--cross", "e", "--cross-type", "q8", "--cache", "kv", "--cache-type", "f16")


def make(shape: str, tokens: int) -> Path:
    """A model of this shape that says so many tokens of a sound, made once."""
    target = CACHE / f"whisper-{shape}-{tokens}.q8_0.gguf"
    if target.exists():
        return target
    import torch
    import transformers

    import slimrt
    from slimrt.modelfile.hf.vocabulary_whisper import special_tokens
    from slimrt.tokenizer.vocabulary import byte_level_alphabet

    torch.manual_seed(0)
    d, layers, heads = SHAPES[shape]
    config = transformers.WhisperConfig(
        vocab_size=N_VOCAB, d_model=d, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * d, decoder_ffn_dim=4 * d,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    names = special_tokens(END, N_VOCAB)
    first_time = END + names.index("<|0.00|>")
    with torch.no_grad():  # one direction of the states says how far the text is, another that no time is due
        decoder = model.model.decoder
        positions, words = decoder.embed_positions.weight, decoder.embed_tokens.weight
        positions[:, :2] = -20.0
        positions[N_PROMPT + tokens :, 0] = 20.0  # of the last token of text: a time stands before the first
        words[:, :2] = 0.0
        words[END, 0] = 1.0
        words[first_time:, 1] = 1.0
    folder = CACHE / f"whisper-{shape}-{tokens}"
    model.save_pretrained(folder)
    letters = list(byte_level_alphabet())
    merges = [[one, other] for one in letters for other in letters][: END - len(letters)]
    text = [*letters, *map("".join, merges)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": END + i, "content": name, "special": True} | plain for i, name in enumerate(names)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(text)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    slimrt.convert(folder, target, outtype="q8_0", progress=False)
    return target


def sound(seed: int) -> bytes:
    """A WAV file of noise, one channel of 16 bits."""
    samples, file = np.random.default_rng(seed).integers(-9000, 9000, SECONDS * RATE, np.int16), io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    return file.getvalue()


@contextlib.contextmanager
def served(model: Path, parallel: int, threads: int) -> Iterator[int]:
    """The port of slimrt serve."""
    port = free_port()
    flags = [*FLAGS, "--parallel", str(parallel), "-t", str(threads), "--port", str(port), "-q"]
    process = subprocess.Popen([sys.executable, "-m", "slimrt", "serve", str(model), *flags])
    try:
        while asyncio.run(client.fetch(port, "/health"))[0] != 200:
            if process.poll() is not None:
                raise SystemExit(f"slimrt serve ended with code {process.returncode}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


async def upload(port: int, data: bytes) -> dict[str, Any]:
    """What is heard of a sound: verbose_json, and the seconds that it took."""
    fields = {"model": "any", "language": "en", "temperature": "0", "response_format": "verbose_json"}
    named = "--x\r\nContent-Disposition: form-data; name="
    parts = [f'{named}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    file = f'{named}"file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    body = "".join([*parts, file]).encode() + data + b"\r\n--x--\r\n"
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    status, _, said = answer.partition(b"\r\n\r\n")
    if status.split()[1] != b"200":
        raise SystemExit(f"an upload was not answered: {answer[:500]!r}")
    return json.loads(said) | {"seconds": time.perf_counter() - began}


async def all_at_once(port: int, sounds: list[bytes]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(upload(port, one) for one in sounds))


async def one_by_one(port: int, sounds: list[bytes]) -> list[dict[str, Any]]:
    return [await upload(port, one) for one in sounds]


def turn(port: int, sounds: list[bytes]) -> dict[str, Any]:
    """Seconds of both ways, and the tokens of each sound, of which there must be as many either way."""
    found: dict[str, Any] = {}
    for way in (one_by_one, all_at_once):
        began = time.perf_counter()
        answers = asyncio.run(way(port, sounds))
        found[way.__name__] = time.perf_counter() - began
        found[f"tokens_{way.__name__}"] = [sum(len(part["tokens"]) for part in one["segments"]) for one in answers]
    if found["tokens_one_by_one"] != found["tokens_all_at_once"]:
        raise SystemExit(f"not the same was heard: {found}")
    return found | {"times": found["one_by_one"] / found["all_at_once"], "load_average": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--uploads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100, help="of text in a sound (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    here = machine.describe()
    data = report.gathered(args.json, here["machine"])
    model, sounds = make(args.shape, args.tokens), [sound(i) for i in range(args.uploads)]
    with served(model, args.uploads, args.threads) as port:
        asyncio.run(upload(port, sounds[0]))
        turns = []
        for _ in range(args.turns):
            turns.append(turn(port, sounds))
            print(json.dumps(turns[-1]), file=sys.stderr, flush=True)
    if args.json:
        cell = {"date": datetime.now().isoformat(timespec="seconds"), "versions": here["versions"], "flags": FLAGS}
        cell |= {"threads": args.threads, "turns": turns}
        data["cells"][f"whisper-{args.shape} q8_0, {args.uploads} sounds of {args.tokens} tokens"] = cell
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    middle = {key: statistics.median(one[key] for one in turns) for key in ("one_by_one", "all_at_once", "times")}
    print(f"{args.uploads} sounds: {middle['one_by_one']:.2f} s one by one, {middle['all_at_once']:.2f} s at once: "
          f"{middle['times']:.2f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
