"""Forecasts with Chronos-2: which series are read together, and horizons beyond one forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import ContextOverflowError
from slimrt.forecast.chronos2 import BRANCHES, Chronos2, Group, quantiles
from slimrt.forecast.series import Values, as_series, check_reach, numbers, recent, rows_of
from slimrt.generation.loop import loop_of
from slimrt.generation.sequences import Sequences
from slimrt.generation.tickets import Call
from slimrt.info import encoder_of
from slimrt.plumbing.arguments import unknown
from slimrt.plumbing.notes import note
from slimrt.runtime.runtime import Runtime

_KEYS = ("target", "past_covariates", "future_covariates")
_LARGEST = float(np.finfo(np.float32).max)


def groups_of(series: Any, horizon: int, together: bool) -> list[Group]:
    """Series as groups, each of one target, but for:

    - (variates, n) in a list, or (batch, variates, n): its variates are the targets of a group;
    - dicts as in chronos-forecasting, {"target": (n,) or (variates, n), "past_covariates": {name: (n,)},
      "future_covariates": {name: (horizon,)}}, the last two may be missing: each a group.

    Args:
        together: all of them are one group (cross_learning).

    Raises:
        ValueError, TypeError: as as_series(), keys that are not these, or covariates of another length.
    """
    given: Any = [series] if isinstance(series, Mapping) else series
    if not isinstance(given, (list, tuple)) and np.ndim(given) == 3:
        given = list(given)
    groups: list[Group] = []
    if isinstance(given, (list, tuple)) and any(map(_has_several, given)):
        for i, one in enumerate(given):
            try:
                groups.append(_group(one if isinstance(one, Mapping) else {"target": one}, horizon))
            except (ValueError, TypeError) as error:
                raise type(error)(f"group {i}: {error}") from None
    else:
        groups = [_of([values], {}, {}) for values in as_series(given)]
    return [_merged(groups)] if together else groups


def _has_several(one: Any) -> bool:
    """Whether an element of a list is a group of series."""
    if isinstance(one, (list, tuple)):
        return len(one) > 0 and np.ndim(one[0]) == 1
    return isinstance(one, Mapping) or np.ndim(one) == 2


def _group(given: Mapping[str, Any], horizon: int) -> Group:
    for key in given:
        if key not in _KEYS:
            raise TypeError(unknown("the key", str(key), _KEYS))
    if "target" not in given:
        raise ValueError("there is no 'target'")
    targets, steps = as_series(given["target"]), {len(row) for row in rows_of(given["target"])}
    if len(steps) > 1:
        raise ValueError(
            f"its targets have {min(steps)} to {max(steps)} steps: give all the same, NaN where there is none"
        )
    past, ahead = _named(given, "past_covariates"), _named(given, "future_covariates")
    for name in ahead:
        if name not in past:
            raise ValueError(f"covariate '{name}' has no past: give its values beside the target's in past_covariates")
    return _of(
        targets,
        {name: _covariate(name, values, max(steps), "the target has") for name, values in past.items()},
        {name: _covariate(name, values, horizon, "the forecast has") for name, values in ahead.items()},
    )


def _named(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = given.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise TypeError(f"{key} is a dict with the numbers of each by its name, got {found!r:.60}")
    return found or {}


def _covariate(name: str, values: Any, steps: int, whose: str) -> Values:
    try:
        found = numbers(values, f"covariate '{name}'")
        # NumPy makes numbers of '2' and True, which chronos-forecasting reads as categories.
        if any(isinstance(one, (str, bytes, bool, np.bool_)) for one in np.asanyarray(values).ravel().tolist()):
            raise TypeError(f"covariate '{name}' is not numbers: {values!r:.60}")
    except TypeError as error:
        raise TypeError(f"{error}; texts, truth values and categories are to be encoded as numbers first") from None
    if len(found) != steps:
        raise ValueError(f"covariate '{name}' has {len(found)} steps, {whose} {steps}")
    return found


def _of(targets: Sequence[Values], past: Mapping[str, Values], ahead: Mapping[str, Values]) -> Group:
    unknown_yet = np.empty(0, np.float32)
    known = (*[unknown_yet] * len(targets), *(ahead.get(name, unknown_yet) for name in past))
    return Group((*targets, *past.values()), known, len(targets))


def _merged(groups: Sequence[Group]) -> Group:
    """One group of the targets, then the covariates, of several."""
    past = [one for group in groups for one in group.past[: group.n_targets]]
    ahead = [one for group in groups for one in group.ahead[: group.n_targets]]
    past += [one for group in groups for one in group.past[group.n_targets :]]
    ahead += [one for group in groups for one in group.ahead[group.n_targets :]]
    return Group(tuple(past), tuple(ahead), sum(group.n_targets for group in groups))


def forecast_groups(runtime: Runtime, model: Chronos2, groups: Sequence[Group], horizon: int, call: Call) -> Values:
    """Quantiles float32 (targets, quantiles, horizon), group after group.

    Beyond one forecast each of BRANCHES is appended to all series of a group as a branch; the quantiles over the
    forecasts of all branches are the next block.

    Raises:
        ContextOverflowError: a group has more rows than the model was loaded for.
        ValueError: values are too large to continue from, or not finite; longer than one forecast, and the model was
            not trained for BRANCHES.
    """
    _check(runtime, model, groups, horizon)
    latest = _step(runtime, model, groups, model.patches(horizon), call)
    blocks, done = [[block] for block in latest], latest[0].shape[2]
    branches = [[group] * len(BRANCHES) for group in groups]
    while done < horizon:
        _check_reach(groups, latest, done - latest[0].shape[2] + 1)
        at = [model.quantiles.index(level) for level in BRANCHES]
        branches = [
            [branch.after(block[:, i], model.context_length) for branch, i in zip(own, at, strict=True)]
            for own, block in zip(branches, latest, strict=True)
        ]
        every = _step(runtime, model, sum(branches, []), model.patches(horizon - done), call)
        n = len(BRANCHES)
        latest = [model.mixed(np.stack(every[i * n : (i + 1) * n])) for i in range(len(groups))]
        done += latest[0].shape[2]
        for own, block in zip(blocks, latest, strict=True):
            own.append(block)
    found = [np.concatenate(own, axis=2)[:, :, :horizon] for own in blocks]
    _check_reach(groups, found, 1, _LARGEST)
    return np.concatenate([one[: group.n_targets] for one, group in zip(found, groups, strict=True)])


def _check(runtime: Runtime, model: Chronos2, groups: Sequence[Group], horizon: int) -> None:
    """That forecast_groups() can begin and end; notes what it does not read."""
    longest = max(len(values) for group in groups for values in group.past)
    if longest > model.context_length:
        note(f"the model reads the last {model.context_length} values of a series, of up to {longest} that there are")
    index = 0
    for group in groups:
        for i, values in enumerate(group.past):
            try:
                recent(values, model.context_length)
            except ValueError as error:
                whose = f"series {index + i}" if i < group.n_targets else f"a covariate of series {index}"
                raise ValueError(f"{whose}: {error}") from None
        index += group.n_targets
    most, rows = encoder_of(runtime.info)["n_source"], max(model.n_rows(group, horizon) for group in groups)
    if rows > most:
        raise ContextOverflowError(
            f"series that are forecast together take {rows} rows of the encoder, and there is room for {most}: "
            f"load the model with n_source={rows} (--n-source {rows})"
        )
    if horizon > model.prediction_length and not set(BRANCHES) <= set(model.quantiles):
        raise ValueError(
            f"a forecast of {horizon} steps goes on from the quantiles {BRANCHES[0]} to {BRANCHES[-1]}, and the model "
            f"was not trained for all of them: give at most {model.prediction_length} steps"
        )


def _check_reach(groups: Sequence[Group], blocks: Sequence[NDArray[np.float32]], first: int, *largest: float) -> None:
    """check_reach() of every target; of a group's covariates as its first target."""
    index = 0
    for group, block in zip(groups, blocks, strict=True):
        for i, one in enumerate(block):
            check_reach(index + (i if i < group.n_targets else 0), one, first, *largest)
        index += group.n_targets


def _step(
    runtime: Runtime, model: Chronos2, groups: Sequence[Group], n_patches: int, call: Call
) -> list[NDArray[np.float32]]:
    """Quantiles float32 (series, quantiles, steps) of each group, n_seqs groups at a time."""
    engine = Sequences(runtime)
    return loop_of(runtime).run(((1, quantiles(engine, model, group, n_patches)) for group in groups), call)
