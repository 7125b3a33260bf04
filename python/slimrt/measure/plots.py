"""Pictures of measurements, for those who have matplotlib (the extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import UnsupportedError
from slimrt.plumbing.files import check_target, written_beside
from slimrt.results import CacheComparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(target: str | os.PathLike[str]) -> None:
    """Refuses a picture that could not be drawn or written, before the work whose result it is to show.

    Raises:
        UnsupportedError: matplotlib is missing, or a format that is not known.
        OSError: as slimrt.plumbing.files.check_target.
    """
    if Path(target).suffix.lower() not in _FORMATS:
        raise UnsupportedError(f"{target}: a picture is written as {', '.join(_FORMATS)}; name the file so")
    check_target(Path(target))
    _figure()


def plot_front(comparison: CacheComparison, target: str | os.PathLike[str]) -> None:
    """Draw KL divergence (logarithmic) against bytes a token, and through the points the Pareto front.

    Rows whose divergence is 0 or not finite have no place on a logarithmic axis; they are left out. Errors as
    check_plot.
    """
    check_plot(target)
    figure = _figure()
    axes = figure.add_subplot()
    rows = [row for row in comparison.rows if 0 < row.kl_mean < np.inf]
    front = [row for row in comparison.front() if row in rows]
    axes.step([row.bytes_per_token for row in front], [row.kl_mean for row in front], where="post", color="0.6",
              label="Pareto front")  # fmt: skip
    for row in rows:
        axes.plot(row.bytes_per_token, row.kl_mean, "o", color="C0" if row in front else "C3")
        axes.annotate(row.cache, (row.bytes_per_token, row.kl_mean), (5, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="bytes a token", ylabel="KL divergence from kv f32, nats (mean)", yscale="log",
             title=f"{Path(comparison.path).name}: {comparison.tokens} tokens, cached decoding")  # fmt: skip
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    axes.legend()
    _write(figure, target)


def plot_spectra(name: str, spectra: Sequence[NDArray[np.float64]], target: str | os.PathLike[str]) -> None:
    """Draw the singular values of every layer's W_K, over the largest. Errors as check_plot."""
    check_plot(target)
    figure = _figure()
    axes = figure.add_subplot()
    from matplotlib import colormaps

    for layer, values in enumerate(spectra):
        colour = colormaps["viridis"](layer / max(len(spectra) - 1, 1))
        axes.plot(np.linspace(0, 1, len(values)), values / values[0], color=colour, label=f"layer {layer}")
    axes.set(xlabel="share of the singular values", ylabel="over the largest", yscale="log",
             title=f"{name}: singular values of W_K")  # fmt: skip
    axes.grid(alpha=0.3)
    if len(spectra) <= 12:
        axes.legend(fontsize=8)
    else:
        first, last = axes.lines[0], axes.lines[-1]
        axes.legend([first, last], ["layer 0", f"layer {len(spectra) - 1}"], fontsize=8)
    _write(figure, target)


def plot_forecast(
    series: Mapping[str, NDArray[np.floating[Any]]],
    quantiles: NDArray[np.float32],
    levels: Sequence[float],
    target: str | os.PathLike[str],
) -> None:
    """Draw series and their forecasts (batch, horizon, q): a line for the middle level, bands between the others.

    Errors as check_plot.
    """
    check_plot(target)
    figure = _figure()
    order = np.argsort(levels)
    all_axes = figure.subplots(len(series), squeeze=False)[:, 0]
    for axes, (name, values), rows in zip(all_axes, series.items(), quantiles, strict=True):
        shown = values[-4 * len(rows) :]  # of a long past the end
        then = np.arange(len(values), len(values) + len(rows))
        axes.plot(np.arange(len(values) - len(shown), len(values)), shown, color="0.3", label=name)
        for low, high in zip(order, order[::-1], strict=True):
            if levels[low] < levels[high]:
                axes.fill_between(then, rows[:, low], rows[:, high], color="C0", alpha=0.2, linewidth=0,
                                  label=f"{levels[low]:g} to {levels[high]:g}")  # fmt: skip
        middle = order[len(order) // 2]
        axes.plot(then, rows[:, middle], color="C0", label=f"{levels[middle]:g}")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    all_axes[-1].set_xlabel("step")
    _write(figure, target)


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no state
    except ImportError:
        raise UnsupportedError("drawing needs matplotlib: pip install 'slimrt[plot]'") from None
    return Figure(figsize=(8, 5.5), layout="constrained")


def _write(figure: Figure, target: str | os.PathLike[str]) -> None:
    with written_beside(Path(target)) as partial:
        figure.savefig(partial, format=Path(target).suffix[1:].lower(), dpi=150)
