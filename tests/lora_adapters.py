# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as PEFT and llama.cpp's convert_lora_to_gguf.py write them, for the models of tests/golden."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from conftest import GOLDEN
from reference_files import hf_tensors

Weights = dict[str, np.ndarray]

Products = dict[str, tuple[np.ndarray, np.ndarray]]  # A [r, in] and B [out, r] by module

RANK, ALPHA = 4, 6


def directory(folder: Path, name: str = "llama_mha", weights: Weights | None = None, dtype: str = "float32") -> Path:
    """A copy of a tiny model in one file, with some weights in place of its own."""
    folder.mkdir(parents=True)
    for file in (GOLDEN / name).glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, folder)
    tensors = {key: np.ascontiguousarray(t, dtype) for key, t in (hf_tensors(GOLDEN / name) | (weights or {})).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def products(name: str, modules: list[str], seed: int = 3) -> Products:
    """Random A [r, in] and B [out, r] for each module, float32."""
    rng, weights = np.random.default_rng(seed), hf_tensors(GOLDEN / name)
    shapes = {module: weights[f"{module}.weight"].shape for module in modules}
    if name.startswith("gpt2"):  # stores [in, out]
        shapes = {module: shape[::-1] for module, shape in shapes.items()}
    return {
        module: (
            rng.normal(size=(RANK, n_in)).astype(np.float32) * 0.3,
            rng.normal(size=(n_out, RANK)).astype(np.float32) * 0.3,
        )
        for module, (n_out, n_in) in shapes.items()
    }


def save_adapter(folder: Path, parts: Weights, **config: object) -> Path:
    """An adapter as PEFT saves it: `parts` without the prefix of its names."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj"],
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    named = {f"base_model.model.{name}": np.ascontiguousarray(t) for name, t in parts.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def as_parts(found: Products) -> Weights:
    return {f"{module}.lora_{x}.weight": t for module, pair in found.items() for x, t in zip("AB", pair, strict=True)}


def save_gguf(
    path: Path, parts: Weights, arch: str = "llama", kind: str = "lora", general: str = "adapter", alpha: float = ALPHA
) -> Path:
    """An adapter as llama.cpp's convert_lora_to_gguf.py writes it."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(general)
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in parts.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_parts(weights: Weights, names: list[str]) -> Weights:
    rng, parts = np.random.default_rng(8), {}
    for name in names:
        n_out, n_in = weights[name].shape
        n_a, n_b = (n_out, n_in) if name == "token_embd.weight" else (n_in, n_out)
        a = rng.normal(size=(RANK, n_a))
        parts[f"{name}.lora_a"] = a.T if name == "token_embd.weight" else a
        parts[f"{name}.lora_b"] = rng.normal(size=(n_b, RANK))
    return parts
