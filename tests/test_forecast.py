# SPDX-License-Identifier: Apache-2.0
"""Forecasts: the parts before and behind the engine, against chronos-forecasting where it is installed."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import slimrt
from conftest import TESTS, third_party
from scripted import ScriptedEngine, scripted_model, write_gguf
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.forecast.bolt import Bolt, ResidualBlock
from slimrt.forecast.chronos import Chronos
from slimrt.forecast.predict import enough_context, extent
from slimrt.forecast.series import as_series
from slimrt.modelfile.source import ModelSource

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

MODELS = TESTS.parent / "models"
CHRONOS = {"context_length": 16, "prediction_length": 6, "low_limit": -15.0, "high_limit": 15.0, "n_special_tokens": 2,
           "n_tokens": 63, "num_samples": 8, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "use_eos_token": True,
           "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
INFO = {"architecture": "t5", "decoder_start_token_id": 0, "n_vocab": 63,
        "encoder": {"n_source": 512, "inputs": "tokens", "n_inputs": 0}}  # fmt: skip


def chronos_file(path, config):
    return write_gguf(path, "t5", {f"slimrt.chronos.{key}": value for key, value in config.items()})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return chronos_file(tmp_path_factory.mktemp("chronos") / "chronos.gguf", CHRONOS | {"kind": "t5"})


def passengers() -> np.ndarray:
    with third_party("series/prophet_example_air_passengers.csv").open() as file:
        return np.array([float(row["y"]) for row in csv.DictReader(file)])


def with_gaps(series: np.ndarray) -> np.ndarray:
    """Without values at both ends, here and there, and for so long that patches are missing as a whole."""
    result = series.copy()
    for gap in (slice(0, 5), slice(20, 60), slice(70, 90, 2), slice(-30, -13), slice(-3, None)):
        result[gap] = np.nan
    return result


def test_values_become_bins_and_bins_values():
    model = Chronos(**CHRONOS)
    series = np.array([1.0, -2.0, 3.0, 2.0], np.float32)
    tokens, positions, scale = model.encode(series)
    assert scale == 2.0 and tokens[-1] == 1 and len(tokens) == 5  # the mean magnitude; the end token
    assert positions is None
    back = model.decode(tokens[:-1].astype(np.int64), scale)
    np.testing.assert_allclose(back, series, atol=scale * (model.centers[1] - model.centers[0]) / 2)
    assert model.encode(np.zeros(3, np.float32))[2] == 1.0
    far, *_ = model.encode(np.array([0.001] * 200 + [9.0], np.float32)[-16:])
    assert far[-2] == model.n_tokens - 1  # beyond the last bin


def test_missing_values_have_no_token():
    """The others keep their places, those before the first do not count, and the end is behind the last."""
    model, nan = Chronos(**CHRONOS), np.nan
    whole, _, scale = model.encode(np.array([1.0, -2.0, 3.0], np.float32))
    tokens, positions, same = model.encode(np.array([nan, 1.0, nan, nan, -2.0, 3.0, nan], np.float32))
    assert tokens.tolist() == whole.tolist() and same == scale
    assert positions.tolist() == [0, 3, 4, 6] and positions.dtype == np.int32
    with pytest.raises(ValueError, match="the last 16 values of a series are all missing"):
        model.encode(np.r_[1.0, [nan] * 16].astype(np.float32))


def test_series_of_every_kind():
    assert [row.tolist() for row in as_series([1, 2, 3])] == [[1, 2, 3]]
    assert [row.tolist() for row in as_series([[1, 2], [3]])] == [[1, 2], [3]]
    assert [row.tolist() for row in as_series(np.arange(4.0).reshape(2, 2))] == [[0, 1], [2, 3]]
    assert [row.tolist() for row in as_series([np.nan, np.nan, 5.0])] == [[5.0]]
    for bad in ([], [[]], [np.nan], [1.0, np.inf], np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match="series|value"):
            as_series(bad)
    with pytest.raises(TypeError, match="series 0 is not numbers"):
        as_series(["a", "b"])
    for odd in (np.array([1.0, 2j]), np.array(["2020-01-01", "2020-01-02"], "M8[D]")):
        with pytest.raises(TypeError, match="series 1 is not numbers"):
            as_series([[1.0, 2.0], odd])
    masked = np.ma.masked_equal([[1.0, -9.0, 3.0]], -9.0)
    np.testing.assert_equal([as_series(masked)[0], as_series(masked[0])[0]], [[1.0, np.nan, 3.0]] * 2)


def repeating(source, tokens):
    """The last value of the series again and again, or by chance one bin more."""
    row = np.full(63, -30.0, np.float32)
    row[[source[-2], source[-2] + 1]] = 0.0
    row[1] = 50.0  # the end, which never comes
    return row


def test_sample_paths(path):
    engine = ScriptedEngine(repeating, n_seqs=3, **INFO)
    model = scripted_model(path, engine)
    quantiles = model.predict_quantiles([1.0, 2.0, 3.0], 4, (0.0, 0.5, 1.0), seed=1)
    assert quantiles.shape == (1, 4, 3) and quantiles.dtype == np.float32
    step = 2.0 * (30 / 59)
    assert set(np.round((quantiles - quantiles.min()) / step, 3).ravel()) <= {0.0, 0.5, 1.0}
    assert engine.encodes == [1] and engine.most == 4 and not engine.live  # 8 paths, 3 at a time, and what they share
    np.testing.assert_array_equal(quantiles, model.predict_quantiles([1.0, 2.0, 3.0], 4, (0.0, 0.5, 1.0), seed=1))
    batch = model.predict_quantiles([[1.0, 2.0, 3.0], [5.0, 5.0]], num_samples=2, seed=1)
    assert batch.shape == (2, 6, 3)


def test_the_temperature_counts_before_top_p(path):
    """As in transformers: a bin of 88 % is more than top_p at temperature 1, and at 2 it has 73 %."""

    def unlike(source, tokens):
        row = np.full(63, -300.0, np.float32)
        row[[30, 40]] = 2.0, 0.0
        return row

    model = scripted_model(path, ScriptedEngine(unlike, n_seqs=8, **INFO))
    for temperature, both in ((1.0, False), (2.0, True), (1e-40, False), (0.0, False)):
        found = model.predict_quantiles(
            [1.0, 2.0], 6, (0.0, 1.0), num_samples=40, temperature=temperature, top_p=0.8, seed=1
        )
        assert (found[..., 0] < found[..., 1]).all() == both and (found[0, :, 0] == found[0, 0, 0]).all(), temperature
    for wrong in (-1.0, np.inf):
        with pytest.raises(ValueError, match="temperature must be"):
            model.predict_quantiles([1.0, 2.0], temperature=wrong)


def test_a_long_horizon_goes_on_from_the_median(path):
    engine = ScriptedEngine(repeating, n_seqs=2, **INFO)
    quantiles = scripted_model(path, engine).predict_quantiles([1.0, 2.0, 3.0], 14, (0.5,), top_k=1)
    assert quantiles.shape == (1, 14, 1) and engine.encodes == [1, 1, 1] and not engine.live


def test_the_context_is_no_larger_than_a_forecast(path, tmp_path):
    assert enough_context(ModelSource(path)) == 32  # 6 steps, in whole blocks
    assert enough_context(ModelSource(write_gguf(tmp_path / "t5.gguf", "t5", {}))) == 0
    model = scripted_model(path, ScriptedEngine(repeating, **INFO | {"n_ctx": 4}))
    with pytest.raises(ContextOverflowError, match="a forecast of 6 steps does not fit the context of 4"):
        model.predict_quantiles([1.0, 2.0])


def test_a_forecast_that_grows_beyond_what_series_may_be(path):
    def rising(source, tokens):
        """The largest bin, whatever came before."""
        row = np.full(63, -30.0, np.float32)
        row[62] = 0.0
        return row

    model = scripted_model(path, ScriptedEngine(rising, **INFO))
    with pytest.raises(ValueError, match=r"series 0: at step \d+ the forecast leaves .* up to 1e\+17") as told:
        model.predict_quantiles([1.0, 2.0], 600, num_samples=2)
    last = int(str(told.value).split("step ")[1].split()[0]) - 1
    assert 100 < last < 200 and np.isfinite(model.predict_quantiles([1.0, 2.0], last, num_samples=2)).all()


def test_what_bolt_cannot_go_on_from():
    with slimrt.Model(MODELS / "tale-chronos.gguf") as model:
        length, series = 24, np.geomspace(1, 1e17, 64)
        found = model.predict_quantiles([np.ones(3), series], length)
        assert found.max() > 1e17 and np.isfinite(found).all()  # nothing is computed from these
        for horizon in (length + 1, 100_000):
            with pytest.raises(ValueError, match="series 1: at step 1 the forecast leaves .* a shorter prediction"):
                model.predict_quantiles([np.ones(3), series], horizon)
        with pytest.raises(UnsupportedError, match="^tale-chronos.gguf reads no texts"):
            model.tokenize("a")  # a server's answers do not tell its paths


def test_columns_of_a_data_frame_are_series():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, None]})
    assert [row[0] for row in as_series(frame)] == [1.0, 3.0] and len(as_series(frame["a"])) == 1


def test_what_cannot_be_forecast(path):
    model = scripted_model(path, ScriptedEngine(repeating, **INFO))
    with pytest.raises(ValueError, match="series 1: the last 16 values of a series are all missing"):
        model.predict_quantiles([[1.0, 2.0], [1.0, *[np.nan] * 16]])
    with pytest.raises(ValueError, match="series 1 has no values: all are missing"):
        model.predict_quantiles([[1.0, 2.0], [np.nan, np.nan]])
    with pytest.raises(ValueError, match="quantile_levels"):
        model.predict_quantiles([1.0, 2.0], quantile_levels=(0.5, 1.5))
    with pytest.raises(ValueError, match="prediction_length must be at least 1"):
        model.predict_quantiles([1.0, 2.0], 0)
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        model.predict_quantiles([1.0, 2.0], num_samples=0)
    with pytest.raises(ValueError, match="series 1 reaches 2e\\+38, more than 1e\\+17: divide it"):
        model.predict_quantiles([[1.0, 2.0], [1e38, -2e38]])
    with pytest.raises(ValueError, match="series 1 has a number that is too large for a float"):
        model.predict_quantiles([[1.0, 2.0], [10**400, 1]])
    with pytest.raises(ValueError, match="quantile_levels are numbers from 0 to 1"):
        model.predict_quantiles([1.0, 2.0], quantile_levels=[10**400])
    with pytest.raises(ValueError, match="top_k must be less than 2\\^31"):
        model.predict_quantiles([1.0, 2.0], top_k=10**400)
    for nothing in (None, {"a": [1.0]}, 3.0):
        with pytest.raises(TypeError, match="a series is numbers"):
            model.predict_quantiles(nothing)


def random_bolt(arcsinh: bool = False) -> Bolt:
    rng = np.random.default_rng(0)

    def block(inputs, outputs):
        shapes = [(7, inputs), (7,), (outputs, 7), (outputs,), (outputs, inputs), (outputs,)]
        return ResidualBlock(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))

    return Bolt(32, 8, 4, 4, (0.1, 0.5, 0.9), arcsinh, np.ones(6, np.float32), block(8, 6), block(6, 24))


@pytest.mark.parametrize("arcsinh", [False, True])
def test_patches_by_plain_loops(arcsinh):
    bolt = random_bolt(arcsinh)
    series = np.random.default_rng(1).normal(size=50).astype(np.float32) * 5 + 20
    series[40] = np.nan
    rows, positions, (mean, deviation) = bolt.patches(series)
    assert positions is None
    context = series[-32:]
    seen = [value for value in context.tolist() if value == value]
    assert mean == pytest.approx(sum(seen) / len(seen), rel=1e-5)
    assert deviation == pytest.approx(np.std(seen), rel=1e-5)
    assert rows.shape == (9, 6) and (rows[-1] == 1).all()
    for patch in range(8):
        values = [(value - mean) / deviation for value in context[4 * patch : 4 * patch + 4].tolist()]
        values = [float(np.arcsinh(value)) for value in values] if arcsinh else values
        x = np.array([0.0 if v != v else v for v in values] + [float(v == v) for v in values])
        hidden = np.maximum(bolt.into.hidden @ x + bolt.into.hidden_bias, 0)
        wanted = bolt.into.output @ hidden + bolt.into.output_bias + bolt.into.residual @ x + bolt.into.residual_bias
        np.testing.assert_allclose(rows[patch], wanted, rtol=2e-4, atol=2e-4)
    assert len(bolt.patches(series[:5])[0]) == 3  # two patches, the first one with three values missing
    series[-12:-4] = np.nan
    fewer, positions, _ = bolt.patches(series)
    assert len(fewer) == 7 and positions.tolist() == [
        0,
        1,
        2,
        3,
        4,
        7,
        8,
    ]  # none of a missing patch
    constant, _, scales = bolt.patches(np.full(8, 3.0, np.float32))
    assert scales == (3.0, pytest.approx(1e-5)) and np.isfinite(constant).all()


def test_other_levels_are_between_the_trained_ones():
    bolt = random_bolt()
    forecast = np.array([[[1.0], [2.0], [4.0]]], np.float32)
    np.testing.assert_array_equal(bolt.at_levels(forecast, [0.9, 0.1]), [[[4.0, 1.0]]])
    assert bolt.at_levels(forecast, [0.0, 0.5, 1.0]).tolist() == [[[1.0, 2.0, 4.0]]]


BOLT_NAMES = {"input_patch_embedding": "input", "output_patch_embedding": "output"}


def bolt_file(folder, target):
    """A GGUF file with what the front end reads of a Chronos-Bolt model."""
    config = json.loads((folder / "config.json").read_text())["chronos_config"]
    state = load_file(folder / "model.safetensors")
    tensors = {"token_embd.weight": state["shared.weight"]}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] in BOLT_NAMES:
            tensors[f"slimrt.bolt.{BOLT_NAMES[parts[0]]}.{parts[1].removesuffix('_layer')}.{parts[2]}"] = tensor
    fields = {f"slimrt.chronos.{key}": value for key, value in config.items()} | {"slimrt.chronos.kind": "bolt"}
    return write_gguf(target, "t5", fields, tensors)


def test_the_extent_of_a_forecast_is_known_before_it(path):
    runtime = scripted_model(path, ScriptedEngine(lambda *_: None, n_seqs=3, **INFO))._runtime
    assert extent(runtime, None, None) == (6, 8) and extent(runtime, 90, 3) == (90, 3)
    with slimrt.Model(MODELS / "tale-chronos.gguf") as bolt:
        steps, paths = extent(bolt._runtime, None, None)
        assert paths == 0 and bolt.predict_quantiles([1.0, 2.0]).shape[1] == steps
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=64) as other, pytest.raises(UnsupportedError, match="forecast"):
        extent(other._runtime, 1, 1)


@pytest.mark.oracle
def test_bolt_is_chronos_forecasting(tmp_path):
    """The whole pipeline, with the encoder and decoder of transformers: a quantile grid, batches, long horizons."""
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    from hf_engine import t5_engine

    folder = third_party("models/dummy-chronos-bolt-model")
    theirs = chronos.ChronosBoltPipeline.from_pretrained(folder, dtype=torch.float32)
    engine = t5_engine(theirs.model, n_seqs=4)
    model = scripted_model(bolt_file(folder, tmp_path / "bolt.gguf"), engine)
    series = passengers()
    gap = series.copy()
    gap[100:105] = np.nan
    batch = [series, series[:37], gap, series[::-1][:90], with_gaps(series)]
    tensors = [torch.tensor(row.copy(), dtype=torch.float32) for row in batch]
    for horizon in (24, 64, 150):
        for levels in ((0.1, 0.5, 0.9), (0.05, 0.25, 0.5, 0.99)):
            with torch.no_grad():
                wanted, _ = theirs.predict_quantiles(tensors, prediction_length=horizon, quantile_levels=list(levels))
            ours = model.predict_quantiles(batch, horizon, levels)
            scale = np.abs(wanted.numpy()).max()
            np.testing.assert_allclose(ours / scale, wanted.numpy() / scale, atol=1e-4, err_msg=f"{horizon} {levels}")
    assert not engine.live
    with pytest.raises(ValueError, match="Chronos-Bolt draws no samples"):
        model.predict_quantiles(series, num_samples=3)


@pytest.mark.oracle
def test_chronos_is_chronos_forecasting(tmp_path):
    """The likeliest path (top_k 1), since theirs and ours do not draw alike; and bins of real series."""
    torch, chronos = pytest.importorskip("torch"), pytest.importorskip("chronos")
    from hf_engine import t5_engine

    folder = third_party("models/dummy-chronos-model")
    theirs = chronos.ChronosPipeline.from_pretrained(folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())["chronos_config"]
    own = {key: value for key, value in (config | config["tokenizer_kwargs"]).items() if key in CHRONOS}
    series = passengers()
    ids, _, scale = theirs.tokenizer.context_input_transform(torch.tensor(series, dtype=torch.float32)[None])
    tokens, _, ours_scale = Chronos(**own).encode(series.astype(np.float32))
    assert tokens.tolist() == ids[0].tolist() and ours_scale == pytest.approx(float(scale[0]), rel=1e-6)
    gaps = with_gaps(series)
    ids, mask, scale = theirs.tokenizer.context_input_transform(torch.tensor(gaps, dtype=torch.float32)[None])
    tokens, positions, ours_scale = Chronos(**own).encode(gaps.astype(np.float32))
    assert tokens.tolist() == ids[mask].tolist() and ours_scale == pytest.approx(float(scale[0]), rel=1e-6)
    assert np.diff(positions).tolist() == np.diff(np.flatnonzero(mask[0])).tolist()
    engine = t5_engine(theirs.model.model, n_seqs=4)
    model = scripted_model(chronos_file(tmp_path / "c.gguf", own | {"kind": "t5"}), engine)
    batch = [series, series[:50], gaps]
    wanted, _ = theirs.predict_quantiles(
        [torch.tensor(row) for row in batch], prediction_length=80, quantile_levels=[0.1, 0.5], top_k=1, num_samples=3
    )
    ours = model.predict_quantiles(batch, 80, (0.1, 0.5), top_k=1, num_samples=3)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-4)
