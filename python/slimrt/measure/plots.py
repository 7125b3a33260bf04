"""Pictures of measurements, for those who have matplotlib (the extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    new_figure()


def plot_front(comparison: CacheComparison, target: str | os.PathLike[str]) -> None:
    """Draw KL divergence (logarithmic) against bytes a token, and through the points the Pareto front.

    Rows whose divergence is 0 or not finite have no place on a logarithmic axis; they are left out. Errors as
    check_plot.
    """
    check_plot(target)
    figure = new_figure()
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
    save(figure, target)


def plot_spectra(name: str, spectra: Sequence[NDArray[np.float64]], target: str | os.PathLike[str]) -> None:
    """Draw the singular values of every layer's W_K, over the largest. Errors as check_plot."""
    check_plot(target)
    figure = new_figure()
    axes = figure.add_subplot()
    from matplotlib import colormaps

    for layer, values in enumerate(spectra):
        colour = colormaps["viridis"](layer / max(len(spectra) - 1, 1))
        axes.plot(np.linspace(0, 1, len(values)), values / values[0], color=colour, label=f"layer {layer}")
    axes.set(xlabel="share of the singular values", ylabel="singular value / largest", yscale="log",
             title=f"{name}: singular values of W_K")  # fmt: skip
    axes.grid(alpha=0.3)
    if len(spectra) <= 12:
        axes.legend(fontsize=8)
    else:
        first, last = axes.lines[0], axes.lines[-1]
        axes.legend([first, last], ["layer 0", f"layer {len(spectra) - 1}"], fontsize=8)
    save(figure, target)


def new_figure(size: tuple[float, float] = (8, 5.5)) -> Figure:
    """A figure of so many inches. UnsupportedError: matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no state
    except ImportError:
        raise UnsupportedError("drawing needs matplotlib: pip install 'slimrt[plot]'") from None
    return Figure(figsize=size, layout="constrained")


def save(figure: Figure, target: str | os.PathLike[str]) -> None:
    """Writes it, in the format that its name says."""
    with written_beside(Path(target)) as partial:
        figure.savefig(partial, format=Path(target).suffix[1:].lower(), dpi=150)
