# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's experts as its checkpoints store them: MXFP4, and what of it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slimrt
from conftest import GOLDEN, relative
from hf_models import MODELS
from reference import Reference
from slimrt.modelfile.gguf import read_gguf
from slimrt.modelfile.hf.gpt_oss import as_gguf
from test_parity import PARITY, golden, oracle, run

NAME = "gpt_oss_plain"
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # of a code
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def packed(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [experts, rows, cols] as the checkpoints have them: codes of neighbours in a byte, an exponent for each
    32."""
    groups = weights.reshape(*weights.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    sizes = np.abs(np.abs(groups / 2 ** exponents[..., None])[..., None] - VALUES[:8]).argmin(axis=-1)
    codes = (sizes + 8 * (groups < 0)).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = VALUES[codes] * np.exp2(scales[..., None].astype(np.float32) - 127)
    return values.reshape(*scales.shape[:-1], -1)


def experts_of(tensors: dict[str, np.ndarray]) -> list[str]:
    return [name for name in tensors if name.endswith(tuple(PARTS))]


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    """The golden's model with experts in MXFP4, and with the same numbers in float32."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    tensors = load_file(GOLDEN / NAME / "model.safetensors")
    config = json.loads((GOLDEN / NAME / "config.json").read_text())
    small, plain = dict(tensors), dict(tensors)
    for name in experts_of(tensors):
        blocks, scales = packed(tensors[name].swapaxes(1, 2))
        small.pop(name)
        small |= {f"{name}_blocks": np.ascontiguousarray(blocks), f"{name}_scales": np.ascontiguousarray(scales)}
        plain[name] = np.ascontiguousarray(unpacked(blocks, scales).swapaxes(1, 2))
    for kind, some, more in (("mxfp4", small, {"quantization_config": METHOD}), ("f32", plain, {})):
        (folder / kind).mkdir()
        save_file(some, folder / kind / "model.safetensors", metadata={"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(config | more))
    return folder / "mxfp4", folder / "f32"


@pytest.mark.unsanitized
def test_every_code_and_exponent_keeps_its_bits():
    """As the gguf package unpacks them; all that float32 holds."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    for exponent in (0, 1, 2, 3, 64, 127, 200, 252):
        scales = np.full((1, 16), exponent, np.uint8)
        raw = as_gguf(blocks, scales)
        got = slimrt.modelfile.gguf.quants.dequantize(raw, slimrt.modelfile.gguf.GGMLQuantizationType.MXFP4)
        assert np.array_equal(got, unpacked(blocks, scales))


def test_experts_are_stored_as_they_were(directories, tmp_path):
    small, plain = directories
    model = read_gguf(slimrt.convert(small, tmp_path / "small.gguf", progress=False).path)
    tensors = load_file(plain / "model.safetensors")
    for layer in range(3):
        for projection, parts in PARTS.items():
            weights = tensors[f"model.layers.{layer}.mlp.experts.{projection}"].swapaxes(1, 2)
            for i, part in enumerate(parts):
                stored = model.tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
                assert stored.type.name == "MXFP4"
                assert np.array_equal(stored.values(), weights[:, i :: len(parts)])


def test_mxfp4_computes_what_the_same_numbers_do(directories, tmp_path):
    """In float32 to the bit; as stored, what is multiplied with is rounded, which may make a token take others."""
    ids, n_prompt, _, n_ctx = golden(NAME, "")
    small, plain = directories
    paths = [
        slimrt.convert(path, tmp_path / f"{path.name}.gguf", outtype="f32", progress=False).path
        for path in (small, plain)
    ]
    wanted = Reference(paths[1]).logits(ids)
    assert np.array_equal(*(run(path, ids, n_prompt, n_ctx) for path in paths))
    assert relative(run(paths[0], ids, n_prompt, n_ctx), wanted) < PARITY
    stored = run(small, ids, n_prompt, n_ctx)
    off = np.abs(stored - wanted).max(axis=1) / np.abs(wanted).max()
    assert 1e-4 < np.median(off) < 3e-2


@oracle
@pytest.mark.oracle
def test_transformers_reads_the_same_numbers(directories):
    import torch
    from transformers import AutoModelForCausalLM

    ids, n_prompt, _, n_ctx = golden(NAME, "")
    small, plain = directories
    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
    assert relative(run(plain, ids, n_prompt, n_ctx), theirs) < PARITY


def changed(tmp_path: Path, small: Path, config: dict | None = None, drop: str = "", crop: str = "") -> Path:
    """A copy with other values in config.json, or without the tensors, or the last rows of those, so called."""
    path = shutil.copytree(small, tmp_path / "changed")
    values = json.loads((path / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps(values))
    tensors = {name: t for name, t in load_file(path / "model.safetensors").items() if not drop or drop not in name}
    tensors = {name: np.ascontiguousarray(t[:, :-1]) if crop and crop in name else t for name, t in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


REFUSED = {
    "another limit": ({"config": {"swiglu_limit": 6.0}}, slimrt.UnsupportedError, "swiglu_limit = 6.0"),
    "no attention bias": ({"config": {"attention_bias": False}}, slimrt.UnsupportedError, "attention_bias"),
    "truncated YaRN": (
        {"config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        slimrt.UnsupportedError,
        "truncate = true",
    ),
    "another packing": (
        {"config": {"quantization_config": {"quant_method": "awq"}}},
        slimrt.UnsupportedError,
        "quantised by 'awq'",
    ),
    "no scales": ({"drop": "down_proj_scales"}, slimrt.ModelFormatError, "without scales"),
    "no blocks": ({"drop": "1.mlp.experts.down_proj_blocks"}, slimrt.ModelFormatError, "down_proj.weight' is missing"),
    "fewer scales": ({"crop": "gate_up_proj_scales"}, slimrt.ModelFormatError, "without scales"),
    "fewer biases": ({"crop": "gate_up_proj_bias"}, slimrt.ModelFormatError, "up_proj.bias"),
    "no sinks": ({"drop": "sinks"}, slimrt.ModelFormatError, "self_attn.sinks' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_run_is_refused(case, directories, tmp_path):
    change, error, words = REFUSED[case]
    path = changed(tmp_path, directories[0], **change)
    with pytest.raises(error, match=words):
        slimrt.convert(path, tmp_path / "out.gguf", progress=False)


def test_a_file_without_sinks_is_refused(convert, tmp_path):
    model = read_gguf(convert(GOLDEN / NAME))
    tensors = {name: tensor for name, tensor in model.tensors.items() if not name.endswith("attn_sinks.weight")}
    path = tmp_path / "model.gguf"
    slimrt.modelfile.gguf.write_gguf(
        path, slimrt.modelfile.gguf.ModelData(model.metadata, tensors), show_progress=False
    )
    with pytest.raises(slimrt.ModelFormatError, match="attn_sinks.weight' is missing"):
        slimrt.Model(path)


def test_the_golden_has_what_matters(convert):
    """Gates and factors beyond 7, and a sink that takes some of every softmax."""
    assert MODELS[NAME].changes["sliding_window"] < 64
    path = convert(GOLDEN / NAME)
    ids = golden(NAME, "")[0]
    whole = Reference(path).logits(ids)
    for part in ("sinks", "clamp"):
        other = Reference(path)
        if part == "clamp":
            other.w.activation = "silu"
        for layer in other.w.layers:
            layer.sinks = layer.sinks if part == "clamp" else None
        assert relative(other.logits(ids), whole) > 1e-2
