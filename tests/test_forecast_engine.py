# SPDX-License-Identifier: Apache-2.0
"""Forecasts by the runtime itself, against chronos-forecasting: its small models on real series, which need ../shared,
and seeded ones of another shape on months.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import TESTS, third_party
from seq2seq_models import weight
from test_forecast import with_gaps

pytestmark = pytest.mark.oracle
SEED = 6  # of weights with which a path does not repeat one value
MONTHS = TESTS.parent / "models" / "months.csv"
SERIES = ("prophet_example_air_passengers", "prophet_example_retail_sales", "prophet_example_yosemite_temps")


sources = pytest.mark.parametrize("source", ["third_party", "seeded"])
FORECASTS = {"context_length": 96, "prediction_length": 16}
BINS = {"tokenizer_class": "MeanScaleUniformBins", "tokenizer_kwargs": {"low_limit": -4.0, "high_limit": 4.0},
        "n_tokens": 64, "n_special_tokens": 2, "pad_token_id": 0, "eos_token_id": 1, "use_eos_token": True,
        "model_type": "seq2seq", "num_samples": 5, "temperature": 1.0, "top_k": 50, "top_p": 1.0}  # fmt: skip
PATCHES = {"input_patch_size": 8, "input_patch_stride": 8, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}


def real_series(source: str) -> list[np.ndarray]:
    """The last 500 values of each, then the same with gaps."""
    rows, column = [], "y" if source == "third_party" else "visitors"
    files = [third_party(f"series/{name}.csv") for name in SERIES] if column == "y" else [MONTHS]
    for path in files:
        with path.open() as file:
            values = [float(row[column] or "nan") for row in csv.DictReader(file)]
        rows.append(np.array([value for value in values if value == value][-500:]))
    return [*rows, *(with_gaps(row) for row in rows)]


def folder_of(name: str, source: str, tmp_path: Path) -> Path:
    """A Hugging Face directory: theirs, or one with seeded weights, in which no part of a layer is small."""
    if source == "third_party":
        return third_party(f"models/{name}")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    bolt, kind = "bolt" in name, "relu" if "bolt" in name else "gated-gelu"
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=48, num_heads=3, num_layers=2, vocab_size=2 if bolt else 64,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, feed_forward_proj=kind,
        decoder_start_token_id=0, reg_token_id=1, tie_word_embeddings=False,
        chronos_config=FORECASTS | (PATCHES if bolt else BINS),
    )  # fmt: skip
    made = transformers.T5ForConditionalGeneration
    if bolt:
        from chronos.chronos_bolt import ChronosBoltModelForForecasting as made
    model = made(config)
    values = {key: torch.tensor(weight(key, tuple(t.shape), SEED)) for key, t in model.state_dict().items()}
    model.load_state_dict({key: values[key] if t.is_floating_point() else t for key, t in model.state_dict().items()})
    model.save_pretrained(tmp_path / name)
    return tmp_path / name


def converted(folder: Path, tmp_path: Path) -> Path:
    slimrt.convert(folder, tmp_path / "model.gguf", progress=False)
    return tmp_path / "model.gguf"


@sources
def test_bolt_s_quantiles(source, tmp_path):
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    folder = folder_of("dummy-chronos-bolt-model", source, tmp_path)
    theirs = chronos.ChronosBoltPipeline.from_pretrained(folder, dtype=torch.float32)
    batch = real_series(source)
    with slimrt.Model(converted(folder, tmp_path), cache_type="f32", cross_type="f32") as model:
        for horizon, levels in ((24, (0.1, 0.5, 0.9)), (100, (0.05, 0.25, 0.99))):
            with torch.no_grad():
                tensors = [torch.tensor(row, dtype=torch.float32) for row in batch]
                wanted, _ = theirs.predict_quantiles(tensors, prediction_length=horizon, quantile_levels=list(levels))
            ours = model.predict_quantiles(batch, horizon, levels)
            assert ours.shape == (len(batch), horizon, len(levels))
            for one, reference in zip(ours, wanted.numpy(), strict=True):
                assert np.abs(one - reference).max() < 3e-6 * np.abs(reference).max()


@sources
def test_chronos_likeliest_path(source, tmp_path):
    """top_k 1, since theirs and ours do not draw alike. Of a longer series the last 512 values and the end are read."""
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    folder = folder_of("dummy-chronos-model", source, tmp_path)
    theirs = chronos.ChronosPipeline.from_pretrained(folder, dtype=torch.float32)
    batch = real_series(source)
    batch += [np.resize(row, 700) for row in batch[-2:]]
    wanted, _ = theirs.predict_quantiles(
        [torch.tensor(row) for row in batch], prediction_length=40, quantile_levels=[0.1, 0.5], top_k=1, num_samples=3
    )
    with slimrt.Model(converted(folder, tmp_path), cache_type="f32", cross_type="f32") as model:
        ours = model.predict_quantiles(batch, 40, (0.1, 0.5), top_k=1, num_samples=3)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-4)
