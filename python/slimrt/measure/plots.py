"""Plots of measurements, with matplotlib (the extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import UnsupportedError
from slimrt.measure.labels import place_labels
from slimrt.plumbing.files import check_target, written_beside
from slimrt.results import CacheComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")
_MARGIN = 2.0  # of the KL axis, as a factor
_SHARES = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2)
_KINDS = {
    "front": ("C0", "on the Pareto front"),
    "other": ("0.55", "off it: another is no larger and closer"),
    "refused": ("C3", "refused as too imprecise (triangle: beyond the axis)"),
}
_ORDER = {said: i for i, (_, said) in enumerate(_KINDS.values())}


def check_plot(target: str | os.PathLike[str]) -> None:
    """Refuse a plot that could not be drawn or written, before the work whose result it is to show.

    Raises:
        UnsupportedError: matplotlib is not installed, or an unknown format.
        OSError: as slimrt.plumbing.files.check_target.
    """
    if Path(target).suffix.lower() not in _FORMATS:
        raise UnsupportedError(f"{target}: a plot is written as {', '.join(_FORMATS)}; name the file so")
    check_target(Path(target))
    new_figure()


def plot_front(comparison: CacheComparison, target: str | os.PathLike[str]) -> None:
    """Draw KL divergence over bytes per token, both logarithmic, with the Pareto front.

    Rows with divergence 0, such as the reference, are left out, since the axis is logarithmic. Rows that loading
    refuses as too imprecise, or that are infinite, do not extend the axis: those beyond it are drawn at its end,
    labelled with their divergence. Errors as check_plot.
    """
    check_plot(target)
    figure = new_figure((8.5, 6))
    axes = figure.add_subplot()
    rows = [row for row in comparison.rows if row.kl_mean != 0]
    finite = [row for row in rows if row.kl_mean < np.inf]
    fine = [row.kl_mean for row in finite if not row.too_imprecise] or [row.kl_mean for row in finite] or [1.0]
    top = _MARGIN**2 * max(fine)
    front = [row for row in comparison.front() if row in rows and row.kl_mean < np.inf]
    axes.step([row.bytes_per_token for row in front], [row.kl_mean for row in front], where="post", color="0.7",
              linewidth=1, zorder=1)  # fmt: skip
    points, texts = [], []
    for row in rows:
        beyond = not row.kl_mean <= top
        how = "refused" if row.too_imprecise else "front" if row in front else "other"
        colour, meaning = _KINDS[how]
        point = (row.bytes_per_token, top if beyond else row.kl_mean)
        axes.plot(*point, "^" if beyond else "o", color=colour, label=meaning, clip_on=False, markersize=5)
        points.append(point)
        texts.append(f"{row.cache}: KL {row.kl_mean:.2g}" if beyond else row.cache)
    _share_axis(axes, comparison)
    axes.set(ylabel=f"KL divergence from {comparison.rows[0].cache.split()[0]} f32, nats (mean)", yscale="log",
             title=f"{Path(comparison.path).name}: {comparison.tokens} tokens, cached decoding")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.set_ylim(min([*fine, *(row.kl_mean for row in finite)]) / _MARGIN, top)
    handles, said = axes.get_legend_handles_labels()
    named = dict(sorted(zip(said, handles, strict=True), key=lambda one: _ORDER.get(one[0], len(_ORDER))))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    corners = [(b.bytes_per_token, a.kl_mean) for a, b in pairwise(front)]
    steps = [(row.bytes_per_token, row.kl_mean) for row in front]
    place_labels(axes, points, texts, [one for both in zip_longest(steps, corners) for one in both if one])
    save(figure, target)


def _share_axis(axes: Axes, comparison: CacheComparison) -> None:
    """Set up the x axis: bytes per token, and their fraction of the reference in f16 (half of that in f32)."""
    reference = comparison.rows[0]
    whole, name = reference.bytes_per_token / 2, reference.cache.split()[0]
    sizes = [whole, *(row.bytes_per_token for row in comparison.rows if row.kl_mean != 0)]
    low, high = min(sizes) / 1.15, max(sizes) * 1.25
    ticks = [whole * share for share in _SHARES if low <= whole * share <= high]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:.0f}\n{100 * tick / whole:.3g} %" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    axes.set_xlabel(f"bytes a token, and their share of {name} f16")
    axes.axvline(whole, color="0.4", linestyle=":", linewidth=1, label=f"{name} f16 = 100 %", zorder=0)


def plot_spectra(name: str, spectra: Sequence[NDArray[np.float64]], target: str | os.PathLike[str]) -> None:
    """Draw the singular values of every layer's W_K, divided by the largest. Errors as check_plot."""
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
    """A figure; size in inches. UnsupportedError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which has windows and global state
    except ImportError:
        raise UnsupportedError("plots need matplotlib: pip install 'slimrt[plot]'") from None
    return Figure(figsize=size, layout="constrained")


def save(figure: Figure, target: str | os.PathLike[str]) -> None:
    """Write a figure to a file, in the format of its suffix."""
    with written_beside(Path(target)) as partial:
        figure.savefig(partial, format=Path(target).suffix[1:].lower(), dpi=150)
