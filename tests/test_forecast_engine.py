# SPDX-License-Identifier: Apache-2.0
"""Forecasts by the runtime itself on real series, against chronos-forecasting."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import slimrt
from conftest import third_party
from test_forecast import with_gaps

pytestmark = pytest.mark.oracle
SERIES = ("prophet_example_air_passengers", "prophet_example_retail_sales", "prophet_example_yosemite_temps")


def real_series() -> list[np.ndarray]:
    """The last 500 values of each, then the same with gaps."""
    rows = []
    for name in SERIES:
        with third_party(f"series/{name}.csv").open() as file:
            values = [float(row["y"] or "nan") for row in csv.DictReader(file)]
        rows.append(np.array([value for value in values if value == value][-500:]))
    return [*rows, *(with_gaps(row) for row in rows)]


def converted(name, tmp_path):
    target = tmp_path / f"{name}.gguf"
    slimrt.convert(third_party(f"models/{name}"), target, progress=False)
    return target


def test_bolt_s_quantiles(tmp_path):
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    folder = third_party("models/dummy-chronos-bolt-model")
    theirs = chronos.ChronosBoltPipeline.from_pretrained(folder, dtype=torch.float32)
    batch = real_series()
    with slimrt.Model(converted("dummy-chronos-bolt-model", tmp_path), cache_type="f32") as model:
        for horizon, levels in ((24, (0.1, 0.5, 0.9)), (100, (0.05, 0.25, 0.99))):
            with torch.no_grad():
                tensors = [torch.tensor(row, dtype=torch.float32) for row in batch]
                wanted, _ = theirs.predict_quantiles(tensors, prediction_length=horizon, quantile_levels=list(levels))
            ours = model.predict_quantiles(batch, horizon, levels)
            assert ours.shape == (len(batch), horizon, len(levels))
            for one, reference in zip(ours, wanted.numpy(), strict=True):
                assert np.abs(one - reference).max() < 1e-4 * np.abs(reference).max()


def test_chronos_likeliest_path(tmp_path):
    """top_k 1, since theirs and ours do not draw alike. Of a longer series the last 512 values and the end are read."""
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    theirs = chronos.ChronosPipeline.from_pretrained(third_party("models/dummy-chronos-model"), dtype=torch.float32)
    batch = real_series()
    batch += [np.resize(row, 700) for row in batch[-2:]]
    wanted, _ = theirs.predict_quantiles(
        [torch.tensor(row) for row in batch], prediction_length=40, quantile_levels=[0.1, 0.5], top_k=1, num_samples=3
    )
    with slimrt.Model(converted("dummy-chronos-model", tmp_path), cache_type="f32") as model:
        ours = model.predict_quantiles(batch, 40, (0.1, 0.5), top_k=1, num_samples=3)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-4)
