"""Writes small valid GGUF files, one for each thing the parser knows, as seeds for gguf_fuzz."""

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def values(writer: gguf.GGUFWriter) -> None:
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", -1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "text")
    writer.add_array("a.strings", ["a", "bc", ""])
    writer.add_array("a.integers", [1, -2, 3])
    writer.add_array("a.floats", [1.0, 2.5])
    writer.add_array("a.bools", [True, False])


def tensors(writer: gguf.GGUFWriter) -> None:
    for n_dims in range(1, 5):
        writer.add_tensor(f"f32.{n_dims}d", np.zeros((2,) * n_dims, np.float32))
    writer.add_tensor("f16", np.zeros((2, 3), np.float16))
    writer.add_tensor("bf16", np.zeros((2, 3), np.uint16), raw_dtype=gguf.GGMLQuantizationType.BF16)


def quantized(writer: gguf.GGUFWriter) -> None:
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor(name, np.zeros((1, block_bytes), np.uint8), raw_dtype=kind)


def aligned(writer: gguf.GGUFWriter) -> None:
    writer.add_custom_alignment(64)
    tensors(writer)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for fill in (values, tensors, quantized, aligned):
        write(folder / f"{fill.__name__}.gguf", fill)


if __name__ == "__main__":
    main()
