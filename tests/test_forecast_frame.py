# SPDX-License-Identifier: Apache-2.0
"""predict_df: DataFrames in and out as chronos-forecasting has them, what it refuses, and levels nobody trained for."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import TESTS
from slimrt.errors import UnsupportedError
from test_forecast_engine import converted, folder_of

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

SHIPPED = TESTS.parent / "models" / "tale-chronos.gguf"


@pytest.fixture(scope="module")
def bolt():
    with slimrt.Model(SHIPPED, n_seqs=4) as model:
        yield model


def frame(freq: str = "ME", n: int = 30, tz: str | None = None, **columns):
    """Two series with dates, shuffled."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    series = []
    for name, length in (("B", n), ("A", n + 2)):
        dates = pandas.date_range("2021-03-20", periods=length, freq=freq, tz=tz)
        series += [pandas.DataFrame({"item_id": name, "timestamp": dates, "target": rng.normal(100, 9, length)})]
    return pandas.concat(series).sample(frac=1, random_state=3).rename(columns=columns)


@pytest.mark.parametrize(("freq", "tz"), [("ME", None), ("B", None), ("h", "Europe/Berlin")])
def test_frames(bolt, freq, tz):
    """Rows in any order; values those of predict_quantiles, dates those of pandas, across a change of clocks."""
    pandas = pytest.importorskip("pandas")
    data = frame(freq, 200 if tz else 30, tz, item_id="shop", timestamp="day", target="sales")
    columns = {"id_column": "shop", "timestamp_column": "day", "target": "sales"}
    found = bolt.predict_df(data, **columns, prediction_length=3, quantile_levels=[0.1, 0.5])
    assert list(found.columns) == ["shop", "day", "target_name", "predictions", "0.1", "0.5"] and len(found) == 6
    assert (found["target_name"] == "sales").all() and (found["predictions"] == found["0.5"]).all()
    first = data["shop"].iloc[0]
    assert found["shop"].tolist() == [first] * 3 + [{"A": "B", "B": "A"}[first]] * 3
    for name, rows in found.groupby("shop"):
        own = data[data["shop"] == name].sort_values("day")
        wanted = pandas.date_range(own["day"].iloc[-1], periods=4, freq=freq)[1:]
        assert rows["day"].tolist() == wanted.tolist()
        quantiles = bolt.predict_quantiles(own["sales"].to_numpy(), 3, (0.1, 0.5))[0]
        np.testing.assert_allclose(rows[["0.1", "0.5"]].to_numpy(), quantiles, rtol=1e-6)


def test_texts_are_dates_where_one_reading_is_possible(bolt):
    data = frame("D", 500)
    texts = data.assign(timestamp=data["timestamp"].dt.strftime("%d.%m.%Y"))
    found = bolt.predict_df(texts, prediction_length=2, quantile_levels=[0.5])
    assert found.equals(bolt.predict_df(data, prediction_length=2, quantile_levels=[0.5]))
    early = data.assign(timestamp=data["timestamp"] - np.timedelta64(19_450, "D"))  # from the end of 1967 on
    texts = early.assign(timestamp=early["timestamp"].dt.strftime("%d.%m.%y"))
    found = bolt.predict_df(texts, prediction_length=2, quantile_levels=[0.5])
    assert found.equals(bolt.predict_df(early, prediction_length=2, quantile_levels=[0.5]))
    with pytest.raises(ValueError, match="may be .*pandas.to_datetime.*format='%d/%m/%Y'"):
        bolt.predict_df(data.assign(timestamp="01/02/2020"))


def test_a_frequency_that_is_insisted_on(bolt):
    pandas = pytest.importorskip("pandas")
    data = frame("D").drop(index=5)
    found = bolt.predict_df(data, freq=pandas.DateOffset(days=2), prediction_length=2, quantile_levels=[0.5])
    ends = data.groupby("item_id")["timestamp"].max()
    assert found["timestamp"].iloc[0] == ends[found["item_id"].iloc[0]] + pandas.Timedelta(days=2)


@pytest.mark.parametrize(
    ("change", "options", "error", "why"),
    [
        (lambda df: df.drop(index=5), {}, ValueError, "series .* has no frequency .* 2021-03-26 .* others are days"),
        (lambda df: df.assign(timestamp=df["timestamp"].iloc[0]), {}, ValueError, "two rows at 2021-"),
        (lambda df: df.iloc[:2], {}, ValueError, "no series has 3 rows, .* freq='D'"),
        (lambda df: df.iloc[:0], {}, ValueError, "the DataFrame has no rows"),
        (lambda df: df.assign(target="x"), {}, ValueError, "'target' must be numbers"),
        (lambda df: df.assign(target=1j), {}, ValueError, "'target' must be numbers, it is complex128"),
        (lambda df: df[[*df.columns, "target"]], {}, ValueError, "several columns 'target'"),
        (lambda df: df.assign(timestamp=3), {}, ValueError, "'timestamp' is not of times, it is int64"),
        (lambda df: df.assign(item_id=None), {}, ValueError, "'item_id' is empty in 62 rows"),
        (lambda df: df, {"target": "sales"}, ValueError, "no column 'sales'; there are item_id, timestamp, target"),
        (lambda df: df, {"target": ["a", "b"]}, TypeError, "predict_df forecasts one value a step"),
        (lambda df: df, {"future_df": 1}, TypeError, "no future_df: covariates are for Chronos-2"),
        (lambda df: df, {"batch_size": 1}, TypeError, "n_seqs of slimrt.Model"),
        (lambda df: df, {"num_sampels": 1}, TypeError, "did you mean 'num_samples'"),
        (lambda df: {"target": [1, 2]}, {}, TypeError, "takes a pandas DataFrame, got dict"),
    ],
)
def test_what_is_refused(bolt, change, options, error, why):
    with pytest.raises(error, match=why):
        bolt.predict_df(change(frame("D")), **options)


def test_without_pandas(bolt, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"DataFrames need pandas: pip install 'slimrt\[forecast\]'"):
        bolt.predict_df(None)


def test_levels_beyond_those_trained_for_are_warned_of(bolt, recwarn):
    series = np.arange(40.0)
    inside = bolt.predict_quantiles(series, 2, (0.1, 0.9))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="trained for quantiles 0.1 to 0.9; .* nearest: 0.01, 0.99") as warned:
        assert (bolt.predict_quantiles(series, 2, (0.01, 0.99)) == inside).all()
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="nearest: 0.05") as warned:
        bolt.predict_df(frame(), prediction_length=1, quantile_levels=[0.05])
    assert warned[0].filename == __file__


def test_what_chronos_2_has_is_refused_by_name(bolt):
    with pytest.raises(TypeError, match="covariates are for Chronos-2"):
        bolt.predict_quantiles([{"target": [1.0, 2.0], "past_covariates": {}}])
    with pytest.raises(ValueError, match="cross_learning .--joint. is for Chronos-2"):
        bolt.predict_quantiles([[1.0, 2.0], [3.0, 4.0]], cross_learning=True)


@pytest.mark.oracle
@pytest.mark.parametrize("freq", ["ME", "B", "15min"])
def test_frames_are_those_of_chronos_forecasting(tmp_path: Path, freq):
    """Names, types, order and dates are equal; values, of Chronos-Bolt, to rounding."""
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    pandas = pytest.importorskip("pandas")
    folder = folder_of("dummy-chronos-bolt-model", "seeded", tmp_path)
    theirs = chronos.ChronosBoltPipeline.from_pretrained(folder, dtype=torch.float32)
    data = frame(freq, 40)
    with slimrt.Model(converted(folder, tmp_path), cache_type="f32", cross_type="f32", n_seqs=2) as model:
        for options in ({"prediction_length": 5, "quantile_levels": [0.1, 0.25, 0.9]}, {"quantile_levels": [0.5]}):
            with torch.no_grad():
                wanted = theirs.predict_df(data, **options)
            pandas.testing.assert_frame_equal(model.predict_df(data, **options), wanted, rtol=3e-6)
