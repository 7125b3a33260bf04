"""Quantile forecasts with a loaded model; several series form a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.cache.planner import whole_blocks
from slimrt.errors import ContextOverflowError, ModelFormatError, UnsupportedError
from slimrt.forecast.bolt import Bolt, ResidualBlock
from slimrt.forecast.chronos import Chronos, Paths
from slimrt.forecast.chronos2 import Chronos2
from slimrt.forecast.joint import forecast_groups, groups_of
from slimrt.forecast.options import PredictOptions, sampling
from slimrt.forecast.series import Values, as_series, check_levels, check_reach
from slimrt.generation.loop import loop_of
from slimrt.generation.search import Encode, Read, Task
from slimrt.generation.sequences import Sequences
from slimrt.generation.tickets import Call
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.arguments import check_seed, check_switch, count, positive, real
from slimrt.plumbing.notes import warn
from slimrt.runtime.kinds import require
from slimrt.runtime.runtime import Runtime

_REGISTER = 1  # id of the [REG] token, if the file does not say
_NAMES = {"chronos-bolt": "Chronos-Bolt", "chronos-2": "Chronos-2"}  # that give quantiles, and draw no samples


def predict(
    runtime: Runtime,
    series: Any,
    prediction_length: int | None,
    quantile_levels: Sequence[float],
    seed: int,
    options: PredictOptions,
    call: Call | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Quantiles float32 (batch, horizon, q), and point forecasts (batch, horizon): the mean of Chronos' paths, or the
    median of others. Arguments and errors as Model.predict_quantiles; seed: already chosen; call: allows to cancel
    it."""
    kind = require(runtime, "chronos", "chronos-bolt", "chronos-2", to="forecast")
    check_seed(seed)
    given, together = sampling(options), options.get("cross_learning", False)
    check_switch("cross_learning", together)
    if kind != "chronos" and (drawn := [name for name, value in given.items() if value is not None]):
        raise ValueError(f"{drawn[0]} belongs to Chronos: {_NAMES[kind]} draws no samples")
    if prediction_length is not None:
        positive("prediction_length", prediction_length)
    file, levels = runtime.source.file, check_levels(quantile_levels)
    if kind == "chronos-2":
        return _chronos2(runtime, series, prediction_length, levels.tolist(), together, call or Call())
    if together:
        raise ValueError("cross_learning (--joint) is for Chronos-2: Chronos and Chronos-Bolt read each series alone")
    rows = as_series(series)
    if kind == "chronos-bolt":
        bolt = read_bolt(file)
        _try(bolt.patches, rows)
        found = _bolt(runtime, bolt, rows, prediction_length or bolt.prediction_length, call or Call())
        return bolt.at_levels(found, levels.tolist()), bolt.at_levels(found, [0.5])[..., 0]
    model = read_chronos(file)
    how = {name: getattr(model, name) if value is None else value for name, value in given.items()}
    positive("num_samples", how["num_samples"])
    _try(model.encode, rows)
    paths = _paths(runtime, model, rows, prediction_length or model.prediction_length, how, seed, call or Call())
    quantiles = np.moveaxis(np.quantile(paths, levels, axis=1), 0, -1).astype(np.float32)
    return quantiles, paths.mean(axis=1, dtype=np.float32)


def _chronos2(
    runtime: Runtime, series: Any, horizon: int | None, levels: list[float], together: bool, call: Call
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """As predict(). together: all series are one group."""
    model = read_chronos2(runtime.source.file)
    horizon = horizon or model.prediction_length
    found = forecast_groups(runtime, model, groups_of(series, horizon, together), horizon, call)
    return model.at_levels(found, levels), model.at_levels(found, [0.5])[..., 0]


def extent(runtime: Runtime, prediction_length: int | None, num_samples: int | None) -> tuple[int, int]:
    """Steps of a forecast, and sample paths drawn for it (0: none): as asked, or the model's own. UnsupportedError: the
    model is for something else."""
    kind, file = require(runtime, "chronos", "chronos-bolt", "chronos-2", to="forecast"), runtime.source.file
    if kind == "chronos-2":
        return prediction_length or read_chronos2(file).prediction_length, 0
    steps = prediction_length or int(_stored(file, "prediction_length"))
    if kind == "chronos-bolt":
        return steps, 0
    return steps, int(_stored(file, "num_samples")) if num_samples is None else num_samples


def warn_beyond(source: ModelSource, levels: Sequence[float]) -> None:
    """Warn of quantile levels outside the range that the model was trained for."""
    trained = trained_levels(source)
    beyond = [f"{level:g}" for level in levels if trained and not min(trained) <= level <= max(trained)]
    if beyond:
        warn(
            f"the model was trained for quantiles {min(trained):g} to {max(trained):g}; beyond them it repeats the "
            f"nearest: {', '.join(beyond)}"
        )


def answered_levels(source: ModelSource, levels: Sequence[float]) -> list[float]:
    """The levels that predict() really returns: those out of the trained range are clamped to it."""
    trained = trained_levels(source)
    return [min(max(level, min(trained)), max(trained)) for level in levels] if trained else list(levels)


def _try(prepare: Callable[[Values], object], rows: Sequence[Values]) -> None:
    """ValueError, with the index of the series, if one of them cannot be prepared for the model."""
    for i, row in enumerate(rows):
        try:
            prepare(row)
        except ValueError as error:
            raise ValueError(f"series {i}: {error}") from None


def _paths(
    runtime: Runtime, model: Chronos, rows: Sequence[Values], horizon: int, how: dict[str, Any], seed: int, call: Call
) -> NDArray[np.float32]:
    """Sample paths float32 (batch, samples, horizon)."""
    if min(horizon, model.prediction_length) > runtime.n_ctx:
        raise ContextOverflowError(
            f"a forecast of {min(horizon, model.prediction_length)} steps does not fit the context of {runtime.n_ctx}: "
            "give a larger n_ctx"
        )
    temperature = real("temperature", how["temperature"])
    if not 0 <= temperature < inf:
        raise ValueError(f"temperature must be 0 or more, and finite, got {temperature}")
    width, start = int(runtime.info["n_seqs"]), int(runtime.info["decoder_start_token_id"])
    at_once = min(width, int(how["num_samples"]))
    engine = Sequences(runtime)
    return np.stack(
        loop_of(runtime).run(
            ((
                at_once,
                Paths(
                    engine, model, start, at_once, int(how["num_samples"]), temperature,
                    count("top_k", how["top_k"]), real("top_p", how["top_p"]), seed + i, i,
                ).draw(row, horizon),
            )
            for i, row in enumerate(rows)),
            call,
        )
    )  # fmt: skip


def _bolt(runtime: Runtime, bolt: Bolt, rows: Sequence[Values], horizon: int, call: Call) -> NDArray[np.float32]:
    """Quantiles float32 (batch, quantiles, horizon).

    Beyond the trained length the forecast of each quantile is appended to the series as a branch; the quantiles over
    the forecasts of all branches are the next block.

    Raises:
        ValueError: they are too large to continue from, or not finite.
    """
    blocks = [_bolt_step(runtime, bolt, rows, call)]
    levels, n, length = bolt.quantiles, len(bolt.quantiles), bolt.prediction_length
    branches = [row[-bolt.context_length :] for row in rows for _ in levels]
    while (done := len(blocks) * length) < horizon:
        for i, block in enumerate(blocks[-1]):
            check_reach(i, block, done - length + 1)
        latest = blocks[-1].reshape(len(branches), -1)
        branches = [
            np.concatenate((branch, more))[-bolt.context_length :]
            for branch, more in zip(branches, latest, strict=True)
        ]
        every = _bolt_step(runtime, bolt, branches, call).reshape(len(rows), n * n, -1)
        blocks.append(np.moveaxis(np.quantile(every, levels, axis=1), 0, 1).astype(np.float32))
    found = np.concatenate(blocks, axis=2)[:, :, :horizon]
    for i, forecast in enumerate(found):
        check_reach(i, forecast, 1, float(np.finfo(np.float32).max))
    return found


def _bolt_step(runtime: Runtime, bolt: Bolt, rows: Sequence[Values], call: Call) -> NDArray[np.float32]:
    """Quantiles float32 (batch, quantiles, prediction_length), n_seqs series at a time."""
    engine = Sequences(runtime)
    return np.stack(loop_of(runtime).run(((1, _bolt_quantiles(engine, runtime, bolt, row)) for row in rows), call))


def _bolt_quantiles(engine: Sequences, runtime: Runtime, bolt: Bolt, row: Values) -> Task[NDArray[np.float32]]:
    """Quantiles float32 (quantiles, prediction_length) for one series."""
    patches, positions, scales = bolt.patches(row)
    sequence = engine.new_sequence()
    try:
        yield Encode(sequence, patches, positions)
        (state,) = yield Read(sequence, [int(runtime.info["decoder_start_token_id"])], states=True)
    finally:
        engine.free_sequence(sequence)
    return bolt.forecast(state, scales)


def rows_together(source: ModelSource, series: Sequence[Any], horizon: int | None) -> int:
    """Rows of the encoder (n_source) with which Chronos-2 forecasts series together, 0 if its own are enough, or for
    other models. Errors as Model.predict_quantiles."""
    if source.kind != "chronos-2":
        return 0
    model = read_chronos2(source.file)
    horizon = horizon or model.prediction_length
    (group,) = groups_of(list(series), horizon, True)
    rows = model.n_rows(group, horizon)
    return rows if rows > model.most_rows else 0


def enough_context(source: ModelSource) -> int:
    """The decoder context that any forecast needs, in whole blocks; 0 for Chronos-2 (it has no decoder) and others."""
    kind = source.kind
    if kind not in ("chronos", "chronos-bolt"):
        return 0
    steps = read_chronos(source.file).prediction_length if kind == "chronos" else 1
    return whole_blocks(steps)


def trained_levels(source: ModelSource) -> tuple[float, ...]:
    """The quantile levels that a model was trained for, sorted; () for Chronos, which draws sample paths."""
    return _levels(source.file) if source.kind in _NAMES else ()


def _levels(file: core.GgufFile) -> tuple[float, ...]:
    return tuple(round(float(level), 6) for level in _stored(file, "quantiles"))  # stored in float32


def read_chronos(file: core.GgufFile) -> Chronos:
    """The parameters of Chronos in a model file (slimrt.chronos.*)."""
    return Chronos(**{field.name: _stored(file, field.name) for field in fields(Chronos)})


def _stored(file: core.GgufFile, name: str, default: Any = None) -> Any:
    """The value slimrt.chronos.NAME. ModelFormatError: it is missing and there is no default."""
    key = f"slimrt.chronos.{name}"
    if key in file.keys():
        return file.value(key)
    if default is None:
        raise ModelFormatError(f"the model has no '{key}': convert it again")
    return default


def read_bolt(file: core.GgufFile) -> Bolt:
    """Chronos-Bolt's parameters, and its tensors slimrt.bolt.*. UnsupportedError: an activation other than relu."""
    into, out = _blocks(file, "bolt")
    value = partial(_stored, file)
    if "slimrt.activation" in file.keys() and file.value("slimrt.activation") != "relu":
        raise UnsupportedError(f"a Chronos-Bolt with {file.value('slimrt.activation')}, not relu, is not supported")
    register = None
    if value("use_reg_token", False):
        register = file.read("token_embd.weight")[value("reg_token_id", _REGISTER)]
    return Bolt(
        context_length=int(value("context_length")),
        prediction_length=int(value("prediction_length")),
        patch_size=int(value("input_patch_size")),
        patch_stride=int(value("input_patch_stride")),
        quantiles=_levels(file),
        arcsinh=bool(value("use_arcsinh", False)),
        register=register,
        into=into,
        out=out,
    )


def read_chronos2(file: core.GgufFile) -> Chronos2:
    """Chronos-2's parameters, and its tensors slimrt.chronos2.*."""
    into, out = _blocks(file, "chronos2")
    value = partial(_stored, file)
    return Chronos2(
        context_length=int(value("context_length")),
        patch_size=int(value("input_patch_size")),
        most_patches=int(value("max_output_patches")),
        time_scale=int(value("time_encoding_scale", value("context_length"))),
        quantiles=_levels(file),
        arcsinh=bool(value("use_arcsinh", False)),
        register=file.read("token_embd.weight")[value("reg_token_id", _REGISTER)],
        into=into,
        out=out,
    )


def _blocks(file: core.GgufFile, model: str) -> tuple[ResidualBlock, ResidualBlock]:
    """The blocks in front of the encoder and behind the last states."""
    into, out = (ResidualBlock.of(file.read, f"slimrt.{model}.{end}") for end in ("input", "output"))
    return into, out
