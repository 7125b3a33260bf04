"""Fold a random model of 7B's shape (d 4096, 32 layers, 32 heads), made on the fly: time and peak memory.

    python benchmarks/fold_7b.py [--layers 3] [--cache k+r --cache-type q8] [--tokens 20480] [--width 4096]

Weights are Gaussian, and inputs have a spectrum that falls as a trained model's does; neither is ever there as a whole,
so no 14 GB file is needed. What is timed is what `slimrt convert` does after its run over the text.
"""

from __future__ import annotations

import argparse
import resource
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Calibration
from slimrt.folding.layers import Request, fold_one
from slimrt.folding.report import ConvertReport
from slimrt.modelfile.gguf import F32, ModelData, Tensor, float32, string, uint32

_CHUNK, _LAYERS = 1024, 32


def random_model(d: int) -> ModelData:
    """A model whose attention weights are drawn when they are asked for."""
    sizes = {"embedding_length": d, "block_count": _LAYERS, "attention.head_count": d // 128}
    metadata = {f"llama.{key}": uint32(value) for key, value in (sizes | {"context_length": 4096}).items()}
    metadata |= {
        "general.architecture": string("llama"),
        "llama.attention.layer_norm_rms_epsilon": float32(1e-5),
        "llama.rope.freq_base": float32(10000.0),
    }

    def drawn(seed: tuple[int, int]) -> np.ndarray:
        weight = np.random.default_rng(seed).standard_normal((d, d), np.float32) / np.float32(np.sqrt(d))
        return weight.view(np.uint8)

    tensors = {}
    for layer in range(_LAYERS):
        for part, of in enumerate(("q", "k", "v", "output")):
            name = f"blk.{layer}.attn_{of}.weight"
            tensors[name] = Tensor(name, (d, d), F32, partial(drawn, (layer, part)))
    return ModelData(metadata, tensors)


def write_inputs(file: Path, d: int, chunks: tuple[int, ...], seed: int) -> None:
    """Inputs of one layer, float32: correlated, with energies over three decades."""
    random = np.random.default_rng((seed, 3))
    spectrum = np.geomspace(1, 10**-1.5, d).astype(np.float32)
    mirror = random.standard_normal(d, np.float32)
    mirror /= np.linalg.norm(mirror)
    with file.open("wb") as out:
        for length in chunks:
            x = random.standard_normal((length, d), np.float32) * spectrum
            x -= 2 * np.outer(x @ mirror, mirror)
            (x / x.std()).tofile(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=_LAYERS, help=f"how many of the {_LAYERS} are folded")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--cache", default="k+r")
    parser.add_argument("--cache-type", default="q8")
    args = parser.parse_args()
    model, chunks = random_model(args.width), (_CHUNK,) * max(5, args.tokens // _CHUNK)
    target = 0.01 if args.cache == "auto" else None
    request = Request(args.cache, tuple(args.cache_type.split(",")), True, target, None, None)
    reports, times = [], []
    with TemporaryDirectory() as folder:
        basis = f"{sum(chunks)} random tokens"
        known = Calibration(basis, model, Attention.of(model), [], Path(folder), chunks)
        for layer in range(args.layers):
            file = Path(folder) / f"inputs.{layer}"
            write_inputs(file, args.width, chunks, layer)
            start = time.perf_counter()
            report, tensors = fold_one(known, layer, request)
            times.append(time.perf_counter() - start)
            reports.append(report)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            made = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
            print(f"layer {layer}: {times[-1]:.1f} s, {made:.0f} MiB of tensors, peak {peak:.2f} GiB", flush=True)
            file.unlink()
    print(ConvertReport(Path("random 7B"), args.cache, args.cache_type, basis, reports, [], None, target).table())
    print(f"{np.mean(times):.1f} s a layer, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
