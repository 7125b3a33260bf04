"""Options of forecasts; options of chronos-forecasting that are not supported are refused with a reason."""

from __future__ import annotations

from typing import Any, TypedDict

from slimrt.plumbing.arguments import unknown

_COVARIATES = ("future_df", "known_covariates_names", "past_covariates", "future_covariates")
_ELSEWHERE = {  # options of chronos-forecasting
    "batch_size": "n_seqs of slimrt.Model says how many series are computed together",
    "validate_inputs": "a table is always checked",
    "limit_prediction_length": "a longer horizon goes on from its own forecast",
}


class PredictOptions(TypedDict, total=False):
    """Options of Model.predict_quantiles and predict_df."""

    num_samples: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    cross_learning: bool


def sampling(options: PredictOptions) -> dict[str, Any]:
    """The options of sample paths, None if not given. TypeError: an unknown option."""
    for name in options:
        if name in _COVARIATES:
            raise TypeError(
                f"no {name}: covariates are for Chronos-2, and in what predict_quantiles forecasts, a dict with target,"
                " past_covariates and future_covariates; Chronos and Chronos-Bolt read the series alone"
            )
        if name in _ELSEWHERE:
            raise TypeError(f"no {name}: {_ELSEWHERE[name]}")
        if name not in PredictOptions.__annotations__:
            raise TypeError(unknown("the option", name, PredictOptions.__annotations__))
    return {name: options.get(name) for name in ("num_samples", "temperature", "top_k", "top_p")}
