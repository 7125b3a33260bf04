"""What sharing K and V over heads and layers costs a trained model, before and after training on; JSON and a table.

    python benchmarks/mlkv.py --out benchmarks/results/2026-11-22-mlkv

Each variant is made by `slimrt convert --kv-layers --kv-heads` and trained on by training/uptrain.py, all with the same
rows of the generated language (training/reference_language.py); the unshared model too, so that they differ in nothing
else. Perplexity of held-out text, in windows as long as the rows of training. Needs torch (the extra `oracle`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import machine
import numpy as np

import slimrt
from slimrt.modelfile.gguf import ModelData, read_gguf

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads stall each other on a shared machine
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "training"))
import torch  # noqa: E402
from reference_language import tales  # noqa: E402
from uptrain import Recipe, uptrain  # noqa: E402

HEAD = ("variant", "layers", "heads", "keys of readers", "bytes/token", "of MHA", "parameters", "merged", "uptrained")


@dataclass(frozen=True)
class Variant:
    """Layers and heads with K and V of their own; keys: what readers take of K ("": there are none)."""

    name: str
    layers: int
    heads: int
    keys: str = ""


def variants(n_layers: int, n_heads: int) -> list[Variant]:
    """From all heads of all layers to one of one; names count heads, as the paper's do."""
    unrotated = [(n_layers - 1, n_heads), (1, n_heads), (n_layers - 1, 1), (1, 1)]
    return [
        Variant(f"MHA-{n_layers * n_heads}", n_layers, n_heads),
        Variant(f"GQA-{n_layers * n_heads // 2}", n_layers, n_heads // 2),
        Variant(f"MQA-{n_layers}", n_layers, 1),
        *(Variant(f"MLKV-{m * g}", m, g, "unrotated") for m, g in unrotated),
        Variant(f"MLKV-{n_heads}", 1, n_heads, "rotated"),
    ]


def parameters(model: ModelData) -> int:
    return sum(int(np.prod(tensor.shape)) for tensor in model.tensors.values())


def text(characters: int, seed: int) -> str:
    """Tales, none of them in the held-out text but by chance."""
    sentences, said, n = tales(random.Random(seed)), list[str](), 0
    while n < characters:
        said.append(next(sentences))
        n += len(said[-1]) + 1
    return " ".join(said)


def perplexity(path: Path, held_out: str, window: int, threads: int) -> float:
    with slimrt.Model(path, cache="kv:f32", n_ctx=window, n_threads=threads) as model:
        return model.perplexity(held_out)


def measure(args: argparse.Namespace, variant: Variant, folder: Path) -> dict[str, Any]:
    """One variant: made, measured, trained, measured again."""
    merged, trained = folder / "merged.gguf", folder / "trained.gguf"
    slimrt.convert(args.model, merged, kv_layers=variant.layers, kv_heads=variant.heads, progress=False,
                   shared_keys=variant.keys or "unrotated")  # fmt: skip
    model = read_gguf(merged)
    held_out = (ROOT / "models" / "heldout.txt").read_text()
    recipe = Recipe(args.steps, args.batch, args.length)
    before, start = perplexity(merged, held_out, args.length, args.threads), time.process_time()
    losses = uptrain(merged, folder / "text.txt", trained, recipe, checkpoint=folder / "checkpoint")
    seconds = time.process_time() - start
    return asdict(variant) | {
        "bytes_per_token": slimrt.plan(merged, cache="kv:f16", n_ctx=args.length).asked.bytes_per_token,
        "parameters": parameters(model),
        "feed_forward_length": model.size("feed_forward_length"),
        "perplexity_merged": before,
        "perplexity_uptrained": perplexity(trained, held_out, args.length, args.threads),
        "last_loss": float(np.mean(losses[-20:])),
        "cpu_seconds": round(seconds),
    }


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    rows, recipe = found["variants"], found["recipe"]
    seconds = sum(row["cpu_seconds"] for row in rows)
    lines = [
        f"# K and V shared over heads and layers: {found['model']}",
        "",
        f"{found['date']}; each variant uptrained for {recipe['steps']} steps of {recipe['batch']} x "
        f"{recipe['length']} tokens ({recipe['text']} characters, seed {recipe['text_seed']}), {seconds} s of "
        f"CPU in all. Perplexity of models/heldout.txt in windows of {recipe['length']}; "
        f"the source itself has {found['perplexity_source']:.3f}. Bytes are of a token's rows in f16.",
        "",
        f"    {found['command']}",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
    ]
    for row in rows:
        share = row["bytes_per_token"] / rows[0]["bytes_per_token"]
        cells = (row["name"], row["layers"], row["heads"], row["keys"] or "-", row["bytes_per_token"],
                 f"{share:.3f}", row["parameters"], f"{row['perplexity_merged']:.2f}",
                 f"{row['perplexity_uptrained']:.3f}")  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tale-neox.gguf")
    parser.add_argument("--out", type=Path, required=True, help="without suffix: .json and .md are written")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--characters", type=int, default=2_000_000, help="of text to train on")
    parser.add_argument("--seed", type=int, default=2024, help="of that text")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = read_gguf(args.model)
    found: dict[str, Any] = machine.describe() | {
        "model": args.model.stem,
        "date": time.strftime("%F"),
        "command": f"python benchmarks/mlkv.py --out benchmarks/results/{args.out.name}",
        "recipe": {"steps": args.steps, "batch": args.batch, "length": args.length, "text": args.characters,
                   "text_seed": args.seed},
        "variants": [],
    }  # fmt: skip
    found["perplexity_source"] = perplexity(
        args.model, (ROOT / "models" / "heldout.txt").read_text(), args.length, args.threads
    )
    with TemporaryDirectory() as name:
        (Path(name) / "text.txt").write_text(text(args.characters, args.seed))
        for variant in variants(sizes.size("block_count"), sizes.size("attention.head_count")):
            found["variants"].append(measure(args, variant, Path(name)))
            args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
