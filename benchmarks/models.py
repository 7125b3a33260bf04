"""Models for speed: random weights in real shapes, seeded, written once into a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

BLOCK = 32  # elements of a q8_0 block: an f16 scale and 32 int8


@dataclass(frozen=True)
class Shape:
    """A Llama-layout model."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    n_vocab: int
    n_ctx: int
    tied: bool


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, 8192, True),
        Shape("codellama-7b-4layers", 4, 4096, 32, 32, 11008, 32016, 16384, False),
        Shape("tiny", 2, 256, 4, 4, 512, 1024, 2048, True),
    )
}


def folder() -> Path:
    """Where models are kept: $SLIMRT_BENCH_MODELS, else benchmarks/models (ignored by git)."""
    return Path(os.environ.get("SLIMRT_BENCH_MODELS", Path(__file__).parent / "models"))


def q8_0(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Random q8_0 rows as bytes, of a spread that keeps activations of order 1: uint8 [rows, cols / 32 * 34]."""
    blocks = np.empty((rows, cols // BLOCK, 2 + BLOCK), dtype=np.uint8)
    scale = np.float16(1.7 / 127 / np.sqrt(cols))  # uniform int8 has a standard deviation of 127 / sqrt(3)
    blocks[..., :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    blocks[..., 2:] = rng.integers(-127, 128, blocks[..., 2:].shape, dtype=np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def make(shape: Shape, *, seed: int = 0) -> Path:
    """The q8_0 GGUF of a shape; written when it is not there yet, beside its name and then renamed."""
    path = folder() / f"{shape.name}.q8_0.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    _metadata(writer, shape)
    tensors = _tensors(shape)
    for name, (rows, cols) in tensors.items():
        if rows:
            size = rows * cols // BLOCK * (2 + BLOCK)
            quantised = (rows, cols // BLOCK * (2 + BLOCK))
            writer.add_tensor_info(name, quantised, np.dtype(np.uint8), size, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor_info(name, (cols,), np.dtype(np.float32), cols * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for rows, cols in tensors.values():
        writer.write_tensor_data(q8_0(rng, rows, cols) if rows else np.ones(cols, np.float32))
    writer.close()
    part.rename(path)
    return path


def _metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(shape.name)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.d_model)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.d_model // shape.n_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def _tensors(shape: Shape) -> dict[str, tuple[int, int]]:
    """name -> (rows, cols); rows 0: a float32 vector."""
    d, kv = shape.d_model, shape.d_model // shape.n_heads * shape.n_kv_heads
    out = {"token_embd.weight": (shape.n_vocab, d), "output_norm.weight": (0, d)}
    if not shape.tied:
        out["output.weight"] = (shape.n_vocab, d)
    for layer in range(shape.n_layers):
        p = f"blk.{layer}."
        out |= {p + "attn_norm.weight": (0, d), p + "attn_q.weight": (d, d), p + "attn_k.weight": (kv, d)}
        out |= {p + "attn_v.weight": (kv, d), p + "attn_output.weight": (d, d), p + "ffn_norm.weight": (0, d)}
        out |= {p + "ffn_gate.weight": (shape.d_ff, d), p + "ffn_up.weight": (shape.d_ff, d)}
        out |= {p + "ffn_down.weight": (d, shape.d_ff)}
    return out


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make(SHAPES[args.shape], seed=args.seed))
