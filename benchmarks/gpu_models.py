"""Models for the GPU's benchmark: random weights in real shapes, the same ones in every layer, quick to write."""

from __future__ import annotations

from pathlib import Path

import blocks
import gguf
import models
import numpy as np

Type = gguf.GGMLQuantizationType
PHI3_MINI_128K = models.Shape("phi3-mini-128k", 32, 3072, 32, 32, 8192, 32064, 131072, False)
LLAMA_7B = models.Shape("llama-7b-128k", 32, 4096, 32, 32, 11008, 32000, 131072, False)
WHISPER_LARGE = {"d": 1280, "layers": 32, "heads": 20, "mel": 128, "vocab": 51866}


class _Writer:
    """Tensors of one shape and type share their numbers."""

    def __init__(self, path: Path, architecture: str):
        self.path, self.part = path, path.with_suffix(".part")
        self.gguf = gguf.GGUFWriter(self.part, architecture)
        self._random = np.random.default_rng(0)
        self._made: dict[tuple[Type, int, int], np.ndarray] = {}
        self._layout: list[np.ndarray] = []

    def add(self, name: str, type: Type, rows: int, cols: int) -> None:
        """rows 0: a vector of ones."""
        key = (type, rows, cols)
        if key not in self._made:
            self._made[key] = blocks.random_rows(type, self._random, rows, cols) if rows else np.ones(cols, np.float32)
        data = self._made[key]
        if rows:
            raw = np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1)
            self.gguf.add_tensor_info(name, raw.shape, np.dtype(np.uint8), raw.nbytes, type)
            data = raw
        else:
            self.gguf.add_tensor_info(name, data.shape, np.dtype(np.float32), data.nbytes)
        self._layout.append(data)

    def finish(self) -> Path:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_ti_data_to_file()
        for data in self._layout:
            self.gguf.write_tensor_data(data)
        self.gguf.close()
        return self.part.rename(self.path)


def _there(name: str) -> tuple[Path, bool]:
    models.folder().mkdir(parents=True, exist_ok=True)
    path = models.folder() / f"{name}.gguf"
    return path, path.exists()


def make_folded(shape: models.Shape) -> Path:
    """A decoder in q4_k_m with W_KV beside it, so that modes kv and k both load; its values mean nothing."""
    weights = "q4_k_m"
    path, there = _there(f"{shape.name}.{weights}.folded")
    if there:
        return path
    writer = _Writer(path, "llama")
    models.add_metadata(writer.gguf, shape, weights)
    for name, (type, rows, cols) in models.tensors(shape, weights).items():
        writer.add(name, type, rows, cols)
    for layer in range(shape.n_layers):
        writer.add(f"blk.{layer}.attn_kv.weight", Type.F16, shape.kv_width, shape.kv_width)
    return writer.finish()


def make_whisper_large() -> Path:
    """Whisper large-v3's decoder in f16, beside an encoder of one layer: sources come encoded."""
    path, there = _there("whisper-large-v3.decoder")
    if there:
        return path
    d, layers, vocab = WHISPER_LARGE["d"], WHISPER_LARGE["layers"], WHISPER_LARGE["vocab"]
    writer = _Writer(path, "whisper")
    for key, value in {
        "block_count": 1, "decoder_block_count": layers, "embedding_length": d, "feed_forward_length": 4 * d,
        "attention.head_count": WHISPER_LARGE["heads"], "context_length": 448, "encoder.context_length": 1500,
        "mel_bins": WHISPER_LARGE["mel"], "decoder_start_token_id": min(50258, vocab - 1), "vocab_size": vocab,
    }.items():  # fmt: skip
        writer.gguf.add_uint32(f"whisper.{key}", value)
    writer.gguf.add_float32("whisper.attention.layer_norm_epsilon", 1e-5)
    writer.gguf.add_tokenizer_model("no_vocab")
    _whisper_tensors(writer, d, layers, vocab, WHISPER_LARGE["mel"])
    return writer.finish()


def _whisper_tensors(writer: _Writer, d: int, layers: int, vocab: int, mel: int) -> None:
    def vector(name: str, width: int) -> None:
        writer.add(name, Type.F32, 0, width)

    def norm(name: str) -> None:
        vector(f"{name}.weight", d)
        vector(f"{name}.bias", d)

    def attention(prefix: str) -> None:
        for part in "qkvo":
            writer.add(f"{prefix}_{part}.weight", Type.F16, d, d)
            if part != "k":
                vector(f"{prefix}_{part}.bias", d)

    writer.add("token_embd.weight", Type.F16, vocab, d)
    writer.add("enc.conv1.weight", Type.F16, d, 3 * mel)
    writer.add("enc.conv2.weight", Type.F16, d, 3 * d)
    vector("enc.conv1.bias", d)
    vector("enc.conv2.bias", d)
    writer.add("enc.position_embd.weight", Type.F16, 1500, d)
    writer.add("dec.position_embd.weight", Type.F16, 448, d)
    norm("enc.output_norm")
    norm("dec.output_norm")
    for prefix in ["enc.blk.0.", *(f"dec.blk.{i}." for i in range(layers))]:
        norm(f"{prefix}attn_norm")
        attention(f"{prefix}attn")
        if prefix.startswith("dec"):
            norm(f"{prefix}cross_attn_norm")
            attention(f"{prefix}cross_attn")
        norm(f"{prefix}ffn_norm")
        writer.add(f"{prefix}ffn_up.weight", Type.F16, 4 * d, d)
        writer.add(f"{prefix}ffn_down.weight", Type.F16, d, 4 * d)
        vector(f"{prefix}ffn_up.bias", 4 * d)
        vector(f"{prefix}ffn_down.bias", d)
