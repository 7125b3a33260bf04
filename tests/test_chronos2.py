# SPDX-License-Identifier: Apache-2.0
"""Chronos-2: the encoder beside a float64 reference, forecasts beside chronos-forecasting, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import chronos2_models
import slimrt
from chronos2_models import HORIZON, LEVELS, PATCHES, SEED, batch, group, waves
from conftest import relative
from reference_chronos2 import Chronos2
from seq2seq_models import committed
from slimrt import _core
from slimrt.errors import CacheUnsupportedError, ContextOverflowError, ModelFormatError, UnsupportedError

PARITY = 1e-5  # of float32 beside float64, relative to the largest value
FORECAST = 1e-4  # through sinh, and branch after branch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chronos2_models.write(tmp_path_factory.mktemp("hf") / "chronos2")


@pytest.fixture(scope="module")
def path(folder, convert):
    return convert(folder)


@pytest.fixture(scope="module")
def model(path):
    with slimrt.Model(path, n_source=256, n_seqs=4) as model:
        yield model


# ---------------------------------------------------------------- the encoder
def series_of(positions: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the rows of several series, and the series of each."""
    at = np.concatenate(positions).astype(np.int32)
    return at, np.repeat(np.arange(len(positions)), [len(one) for one in positions])


GROUPS = {
    "one series": [[0, 1, 2, 5, 6]],
    "three": [[0, 1, 2, 3, 4], [2, 3, 4], [0, 3, 4]],
    "of one row": [[3], [3], [2], [0]],
    "none in common": [[0, 1], [0], [0, 2]],
}


@pytest.mark.parametrize("which", GROUPS)
def test_states_of_a_group(which, path):
    at, series = series_of(GROUPS[which])
    rows = np.random.RandomState(SEED).standard_normal((len(at), 48)).astype(np.float32)
    engine = _core.Engine(str(path))
    (got,) = engine.encode([(engine.new_sequence(), rows, at)], states=True)
    model = Chronos2(path)
    assert relative(got, model.encode(rows, at, series, np.zeros(len(at)))) < PARITY
    if which == "three":  # each part matters
        assert relative(got, model.encode(rows, at, series, series)) > 1e-3
        assert relative(got, model.encode(rows, at + series, series, np.zeros(len(at)))) > 1e-3


def test_groups_of_a_call_do_not_mix(path):
    """Whether they are encoded together or, for want of room, one after another."""
    parts, random = [series_of(one) for one in GROUPS.values()], np.random.RandomState(SEED)
    inputs = [random.standard_normal((len(at), 48)).astype(np.float32) for at, _ in parts]
    for n_source in (64, 12):
        engine = _core.Engine(str(path), n_seqs=len(parts), n_source=n_source)
        items = [(engine.new_sequence(), rows, at) for rows, (at, _) in zip(inputs, parts, strict=True)]
        states = engine.encode(items, states=True)
        for got, rows, (at, series) in zip(states, inputs, parts, strict=True):
            assert relative(got, Chronos2(path).encode(rows, at, series, np.zeros(len(at)))) < PARITY


def test_an_encoder_alone_keeps_nothing(path):
    engine = _core.Engine(str(path), n_seqs=2)
    info, memory = engine.info(), engine.memory()
    assert info["layers"] == [] and info["cross"] is None and info["encoder"]["inputs"] == "series"
    assert memory["cache"] == memory["cache_bytes_per_token"] == engine.n_blocks() == engine.free_blocks() == 0
    sequence, rows = engine.new_sequence(), np.zeros((3, 48), np.float32)
    engine.encode([(sequence, rows)])
    engine.encode([(sequence, rows)])  # nothing was kept
    with pytest.raises(UnsupportedError, match="'chronos2' has no decoder"):
        engine.append([(sequence, np.zeros(1, np.int32))])
    with pytest.raises(ValueError, match="has no source"):
        engine.alignment(sequence, np.zeros(1, np.int32), [(0, 0)])
    for options in ({"cache": "kv"}, {"cross": "e"}, {"cache_type_k": "q8"}, {"sparse_threshold": 0.1}):
        with pytest.raises(ValueError, match="no decoder, and so no cache"):
            _core.Engine(str(path), **options)
    with pytest.raises(ContextOverflowError, match="at position 12"):
        engine.encode([(sequence, rows, np.array([0, 12, 3], np.int32))])


# ---------------------------------------------------------------- forecasts
def close(ours: np.ndarray, wanted: np.ndarray) -> None:
    assert ours.shape == wanted.shape
    for one, reference in zip(ours, wanted, strict=True):
        assert relative(one, reference) < FORECAST


def test_goldens(model):
    wanted = committed("chronos2")
    close(model.predict_quantiles([group()], HORIZON, LEVELS), wanted["group"])
    close(model.predict_quantiles(batch(), HORIZON, LEVELS), wanted["alone"])
    close(model.predict_quantiles(batch(), 5, LEVELS), wanted["short"])
    close(model.predict_quantiles(batch()[:-1], HORIZON, LEVELS, cross_learning=True), wanted["together"])


def test_what_a_constant_covariate_is_does_not_matter(model):
    """Whether the mean in float32 is its value, as of 4, or not, as of 497.3 and 0.1."""
    found = [
        model.predict_quantiles([{"target": waves(60, 1), "past_covariates": {"price": np.full(60, price)}}], 9, LEVELS)
        for price in (4.0, 497.3, 0.1)
    ]
    np.testing.assert_array_equal(found[1:], found[:1] * 2)


@pytest.mark.unsanitized
@pytest.mark.oracle
def test_golden_recomputed(folder):
    pytest.importorskip("chronos")
    fresh, kept = chronos2_models.golden(folder), committed("chronos2")
    for name, values in kept.items():
        assert relative(fresh[name], values) < 1e-5, name


@pytest.mark.unsanitized
@pytest.mark.oracle
@pytest.mark.parametrize("changes", [{}, {"use_arcsinh": False, "time_encoding_scale": 100}])
def test_forecasts_are_chronos_forecasting_s(changes, tmp_path):
    """Other horizons, levels between those trained for and beyond, variates, all groups together, a quantised model."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("chronos")
    folder = chronos2_models.write(tmp_path / "hf", **changes)
    theirs = chronos2_models.pipeline(folder)
    variates = [np.stack([waves(n, 11), waves(n, 12), waves(n, 13)]) for n in (40, 9)]
    path = tmp_path / "model.gguf"
    slimrt.convert(folder, path, progress=False)
    with slimrt.Model(path, n_source=256) as model:
        for inputs, horizon, levels, options in (
            ([*batch(), waves(200, 9)], 8, (0.05, 0.5, 0.995), {}),
            (batch(), 24, (0.0, 0.33, 1.0), {}),
            (batch()[:-1], 25, (0.1, 0.9), {"cross_learning": True}),
            (variates, 30, (0.25, 0.5), {}),
            (variates, 30, (0.25, 0.5), {"cross_learning": True}),
        ):
            wanted, median = theirs.predict_quantiles(
                [torch.tensor(one) for one in inputs],
                prediction_length=horizon,
                quantile_levels=list(levels),
                **options,
            )
            close(model.predict_quantiles(inputs, horizon, levels, **options), torch.cat(wanted).numpy())


def test_shapes_and_defaults(model):
    assert model.predict_quantiles(waves(30, 1)).shape == (1, 24, 3)  # as many steps as one forecast has
    cube = np.stack([np.stack([waves(30, i), waves(30, i + 1)]) for i in range(3)])
    found = model.predict_quantiles(cube, 4)
    assert found.shape == (6, 4, 3)  # (batch, variates, n): each a group
    np.testing.assert_allclose(found[2:4], model.predict_quantiles([cube[1].tolist()], 4), rtol=1e-5)
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"a": waves(30, 1), "b": waves(30, 2)}, index=range(7, 37))
    by_column = model.predict_quantiles({"target": rows, "past_covariates": {"x": rows["a"]}}, 4)
    assert by_column.shape == (2, 4, 3)
    one = model.predict_quantiles({"target": waves(30, 1)}, 4)
    np.testing.assert_allclose(one, model.predict_quantiles(waves(30, 1), 4), rtol=1e-5)
    assert relative(found[2:4], model.predict_quantiles(list(cube[1]), 4)) > 1e-3  # a list of series: alone


def test_a_series_longer_than_the_context(model, caplog):
    long = waves(90, 5)
    with caplog.at_level("INFO", "slimrt"):
        cut = model.predict_quantiles(long[-60:], 4)
        assert not caplog.messages
        np.testing.assert_array_equal(model.predict_quantiles(long, 4), cut)
    assert caplog.messages == ["the model reads the last 60 values of a series, of up to 90 that there are"]


def test_quantised(folder, model, tmp_path):
    path = tmp_path / "q8.gguf"
    slimrt.convert(folder, path, outtype="q8_0", progress=False)
    with slimrt.Model(path) as quantised:
        got = quantised.predict_quantiles(batch(), 8, (0.5,))
    for one, wanted in zip(got, model.predict_quantiles(batch(), 8, (0.5,)), strict=True):
        assert relative(one, wanted) < 0.05


# ---------------------------------------------------------------- what is refused
BAD = {
    "an unknown key": ({"target": waves(9, 1), "targets": 1}, TypeError, "group 0: .*targets"),
    "no target": ({"past_covariates": {}}, ValueError, "no 'target'"),
    "another length": (
        {"target": waves(9, 1), "past_covariates": {"x": waves(8, 1)}},
        ValueError,
        "covariate 'x' has 8 steps, the target has 9",
    ),
    "another horizon": (
        {"target": waves(9, 1), "past_covariates": {"x": waves(9, 1)}, "future_covariates": {"x": waves(3, 1)}},
        ValueError,
        "covariate 'x' has 3 steps, the forecast has 4",
    ),
    "no past": ({"target": waves(9, 1), "future_covariates": {"x": waves(4, 1)}}, ValueError, "'x' has no past"),
    "categories": (
        {"target": waves(3, 1), "past_covariates": {"x": ["a", "b", "a"]}},
        TypeError,
        "covariate 'x' is not numbers.* encoded as numbers",
    ),
    "truth values": (
        {"target": waves(3, 1), "past_covariates": {"x": np.array([True, False, True])}},
        TypeError,
        "covariate 'x' is not numbers.* truth values .* encoded as numbers",
    ),
    "categories called by numbers": (
        {"target": waves(3, 1), "past_covariates": {"x": ["1", "2", "1"]}},
        TypeError,
        "covariate 'x' is not numbers",
    ),
    "covariates without names": (
        {"target": waves(3, 1), "past_covariates": np.zeros((2, 3))},
        TypeError,
        "group 0: past_covariates is a dict",
    ),
    "targets of other lengths": (
        {"target": [waves(9, 1), waves(5, 2)]},
        ValueError,
        "targets have 5 to 9 steps",
    ),
    "infinite": (
        {"target": waves(1, 1), "past_covariates": {"x": [np.inf]}},
        ValueError,
        "covariate 'x' has infinite values",
    ),
    "a covariate's end": (
        {"target": waves(90, 1), "past_covariates": {"x": np.r_[waves(30, 1), np.full(60, np.nan)]}},
        ValueError,
        "a covariate of series 0: the last 60 values",
    ),
    "a table": ({"target": waves(9, 1), "past_covariates": {"x": waves(9, 1)[None]}}, ValueError, "has shape"),
    "nothing there": ([np.full((2, 5), np.nan)], ValueError, "group 0: series 0 has no values"),
}


@pytest.mark.parametrize("what", BAD)
def test_groups_that_cannot_be(what, model):
    series, error, why = BAD[what]
    with pytest.raises(error, match=why):
        model.predict_quantiles(series, 4)


def test_what_the_model_cannot_do(model, path):
    with pytest.raises(ValueError, match="Chronos-2 draws no samples"):
        model.predict_quantiles(waves(9, 1), num_samples=3)
    with pytest.raises(UnsupportedError, match="is a Chronos-2 model.*: use slimrt forecast"):
        model.generate("a")
    with slimrt.Model(path) as small, pytest.raises(ContextOverflowError, match="n_source=20"):
        small.predict_quantiles([waves(60, i) for i in range(2)], 8, cross_learning=True)
    for options in ({"cache": "k"}, {"cross": "e"}, {"cache_type": "q8"}):
        with pytest.raises(CacheUnsupportedError, match="no decoder, and so no cache"):
            slimrt.Model(path, **options)
    for options in ({"n_ctx": 512}, {"cache_tokens": 512}):
        for made in (slimrt.Model, slimrt.plan):
            with pytest.raises(UnsupportedError, match=f"no decoder, and so no c.*: leave out {next(iter(options))}"):
                made(path, **options)
    assert repr(model).endswith(": chronos2>")


CONFIGS = {
    "patches that overlap": ({"input_patch_stride": 4}, UnsupportedError, "input_patch_stride 4"),
    "another output": ({"output_patch_size": 16}, UnsupportedError, "output_patch_size 16"),
    "no register": ({"use_reg_token": False}, UnsupportedError, "use_reg_token False"),
    "no size": ({"context_length": "8"}, ModelFormatError, "says no .*context_length"),
    "no quantiles": ({"quantiles": [0, 1]}, ModelFormatError, "quantiles are not"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configs_that_are_refused(what, tmp_path):
    changes, error, why = CONFIGS[what]
    folder = chronos2_models.write(tmp_path / "hf", **changes)
    with pytest.raises(error, match=why):
        slimrt.convert(folder, tmp_path / "out.gguf", progress=False)


def test_longer_horizons_need_their_quantiles(tmp_path):
    folder = chronos2_models.write(tmp_path / "hf", quantiles=[*PATCHES["quantiles"][:-2], 0.95, 0.99])
    path = tmp_path / "out.gguf"
    slimrt.convert(folder, path, progress=False)
    with slimrt.Model(path) as model:
        assert model.predict_quantiles(waves(20, 1), 24).shape == (1, 24, 3)
        with pytest.raises(ValueError, match="not trained for all of them: give at most 24 steps"):
            model.predict_quantiles(waves(20, 1), 25)


# ---------------------------------------------------------------- tables and commands
@pytest.mark.unsanitized
@pytest.mark.oracle
def test_frames_are_those_of_chronos_forecasting(folder, model):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("chronos")
    days = pandas.date_range("2024-01-01", periods=30)
    frame = pandas.concat([pandas.DataFrame({"item_id": i, "timestamp": days, "target": waves(30, i)}) for i in (1, 2)])
    theirs = chronos2_models.pipeline(folder)
    for options in ({}, {"cross_learning": True}):
        asked = {"prediction_length": 9, "quantile_levels": [0.1, 0.9], **options}
        ours, wanted = model.predict_df(frame, **asked), theirs.predict_df(frame, **asked)
        assert list(ours.columns) == list(wanted.columns) and ours["timestamp"].equals(wanted["timestamp"])
        values = ["predictions", "0.1", "0.9"]
        np.testing.assert_allclose(ours[values], wanted[values], rtol=FORECAST)
    with pytest.raises(TypeError, match="no future_df: covariates are for Chronos-2, and in what predict_quantiles"):
        model.predict_df(frame, future_df=frame)


def test_frames_whose_series_end_at_other_times(model):
    pandas = pytest.importorskip("pandas")
    frame = pandas.concat(
        pandas.DataFrame({"item_id": i, "timestamp": pandas.date_range("2024-01-01", periods=n), "target": waves(n, i)})
        for i, n in ((1, 30), (2, 29))
    )
    assert len(model.predict_df(frame, prediction_length=3)) == 6
    with pytest.raises(ValueError, match="series 1 ends at 2024-01-30.* leave out cross_learning"):
        model.predict_df(frame, prediction_length=3, cross_learning=True)
    with pytest.warns(UserWarning, match="not the columns price, sales: predict_quantiles takes them"):
        model.predict_df(frame.assign(price=1.0, sales=2.0), prediction_length=3)


@pytest.fixture
def table(tmp_path):
    rows = [f"2024-01-{day + 1:02},{a},{b}" for day, (a, b) in enumerate(zip(waves(30, 1), waves(30, 2), strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(["day,a,b", *rows]))
    return tmp_path / "t.csv"


def values_of(out: str) -> np.ndarray:
    return np.array([line.split(",")[2:] for line in out.splitlines()[1:]], float)


@pytest.mark.unsanitized
def test_the_command(path, model, run, table):
    """--joint takes as much of n_source as the series need."""
    asked = ("forecast", path, table, "--column", "a", "--column", "b", "-n", "40", "--quantiles", "0.1,0.9")
    series = [waves(30, 1), waves(30, 2)]
    for flags, options in (((), {}), (("--joint",), {"cross_learning": True})):
        code, out, err = run(*asked, *flags)
        assert code == 0, err
        wanted = model.predict_quantiles(series, 40, (0.1, 0.9), **options)
        np.testing.assert_allclose(values_of(out), wanted.reshape(-1, 2), rtol=FORECAST)
        assert out.splitlines()[1].startswith("a,2024-01-31,")
    code, _, err = run(*asked, "--joint", "--n-source", "12")
    assert code == 1 and "load the model with n_source=" in err


@pytest.mark.unsanitized
def test_series_of_other_ends_are_not_joint(path, run, tmp_path):
    rows = [f"2024-01-{day:02},{name},{day}" for name, most in (("x", 9), ("y", 10)) for day in range(1, most + 1)]
    (tmp_path / "ids.csv").write_text("\n".join(["day,id,value", *rows]))
    asked = ("forecast", path, tmp_path / "ids.csv", "--id", "id", "-n", "2")
    code, _, err = run(*asked, "--joint")
    assert code == 1 and "series x goes on with 2024-01-10" in err and "leave out --joint" in err
    assert run(*asked)[0] == 0


@pytest.mark.unsanitized
def test_what_other_commands_say(path, folder, run, tmp_path):
    code, out, _ = run("inspect", path)
    assert code == 0 and "none: the model has no decoder" in out
    code, out, _ = run("plan", path)
    assert code == 0 and "fits in" in out
    with slimrt.Model(path) as model:
        memory, planned = model.memory(), slimrt.plan(path).asked
        assert planned.cache_bytes == memory["cache"] == 0 and planned.total == memory["total"] + memory["mapped"]
    for verb, *flags in (("generate", "-p", "a"), ("bench",), ("perplexity", folder / "config.json")):
        code, _, err = run(verb, path, *flags)
        assert code == 1 and "is a Chronos-2 model, and it has no decoder: use slimrt forecast" in err, verb
    refused = {
        ("--cache", "k"): "no decoder, and so no cache",
        ("--cross", "e"): "no decoder, and so no cache",
        ("--verify",): "Chronos-2 has none: compare forecasts",
    }
    for flags, why in refused.items():
        code, _, err = run("convert", path, "-o", tmp_path / "out.gguf", *flags)
        assert code == 1 and why in err, flags
