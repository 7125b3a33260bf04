# SPDX-License-Identifier: Apache-2.0
"""A tiny random Chronos-2, in which no part of a layer is small, and what chronos-forecasting computes with it.

Committed are config.json, the names and shapes of the tensors, and golden.npz; the weights come from a seed, in NumPy.
Only what makes goldens needs torch and chronos-forecasting.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from seq2seq_models import GOLDEN, weight

NAME, SEED = "chronos2", 3
CONFIG = {"d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}  # heads narrower than the model
PATCHES = {
    "context_length": 60,  # not a whole number of patches
    "input_patch_size": 8,
    "input_patch_stride": 8,
    "output_patch_size": 8,
    "max_output_patches": 3,
    "quantiles": [0.01, *(round(0.1 * i, 1) for i in range(1, 10)), 0.99],
    "use_reg_token": True,
    "use_arcsinh": True,
    "time_encoding_scale": 60,
}
LEVELS = (0.1, 0.5, 0.99)
HORIZON = 53  # more than twice what one forecast has


def write(directory: Path, **changes: object) -> Path:
    """The model as a Hugging Face directory, without torch; changes: of chronos_config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDEN / NAME / "config.json").read_text())
    config["chronos_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    shapes = json.loads((GOLDEN / NAME / "tensors.json").read_text())
    tensors = {key: _weight(key, tuple(shape)) for key, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = weight(name.replace("patch_embedding", "patch"), shape, SEED)  # matrices, and no embeddings
    if name.endswith(("attention.q.weight", "attention.k.weight")):
        values = values * np.float32(16**-0.25)  # scores are not divided by the square root of a head's width
    return 0.5 * values if name.startswith("output_patch") else values  # sinh makes much of more


def waves(n: int, seed: int) -> np.ndarray:
    """A series float32 (n,) with a season, a trend and noise, far from 0."""
    random, t = np.random.RandomState(seed), np.arange(n)
    noise = random.standard_normal(n)
    return (50 * seed + 0.2 * t + 5 * np.sin(2 * np.pi * t / 7 + seed) + noise).astype(np.float32)


def group() -> dict[str, object]:
    """Two targets of which one has gaps, a covariate that is known ahead but for some steps, and one that is not."""
    n = 71
    target = np.stack([waves(n, 1), waves(n, 2)])
    target[1, [0, 1, 2, *range(30, 50), 65]] = np.nan
    ahead = waves(n + HORIZON, 3)[n:]
    ahead[[4, 40]] = np.nan
    return {
        "target": target,
        "past_covariates": {"known": waves(n, 3), "past": waves(n, 4)},
        "future_covariates": {"known": ahead},
    }


def batch() -> list[np.ndarray]:
    """Series of different lengths: longer than the context, with gaps, short, constant."""
    gaps = waves(64, 6)
    gaps[[5, *range(20, 41), 60]] = np.nan
    return [waves(90, 5), gaps, waves(13, 7), waves(3, 8), np.full(20, 4.0, np.float32)]


# ---------------------------------------------------------------- with torch and chronos-forecasting
def describe() -> None:
    """Writes config.json and tensors.json as transformers saves the model."""
    import tempfile

    from chronos.chronos2 import Chronos2Model
    from chronos.chronos2.config import Chronos2CoreConfig
    from safetensors.numpy import load_file

    model = Chronos2Model(Chronos2CoreConfig(**CONFIG, chronos_config=PATCHES))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shapes = {key: list(one.shape) for key, one in sorted(load_file(f"{folder}/model.safetensors").items())}
        config = json.loads(Path(folder, "config.json").read_text())
    (GOLDEN / NAME / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    lines = ",\n".join(f'"{key}": {shape}' for key, shape in shapes.items())
    (GOLDEN / NAME / "tensors.json").write_text(f"{{\n{lines}\n}}\n")


def pipeline(directory: Path):
    """chronos-forecasting's, in float32."""
    import torch
    from chronos import Chronos2Pipeline

    return Chronos2Pipeline.from_pretrained(directory, dtype=torch.float32)


def golden(directory: Path) -> dict[str, np.ndarray]:
    """Quantiles [series, HORIZON, LEVELS]: group: of group(). alone, together: of batch(), each by itself, and with
    cross_learning, without the constant one, whose deviation after its own forecast is rounding. short: of batch(), 5
    steps."""
    import torch

    theirs, rows = pipeline(directory), [torch.tensor(row) for row in batch()]

    def of(inputs: list[object], horizon: int = HORIZON, **options: bool) -> np.ndarray:
        found, _ = theirs.predict_quantiles(inputs, prediction_length=horizon, quantile_levels=list(LEVELS), **options)
        return torch.cat(found).numpy()

    return {
        "group": of([group()]),
        "alone": of(rows),
        "together": of(rows[:-1], cross_learning=True),
        "short": of(rows, horizon=5),
    }
