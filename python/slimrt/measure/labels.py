"""Places labels beside the points of a plot such that they overlap neither each other nor points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels

_RADII = (6, 12, 18, 27, 38, 52)  # distances of a label from its mark in points, tried in this order
_ANGLES = (45, 0, -45, 90, -90, 135, -135, 180)  # degrees, in order of preference
_LEADER = 12  # points; labels farther away get a leader line
_MARK = 4  # radius of a mark in points
_SIZE = 8  # of letters, in points


def place_labels(axes: Axes, points: Sequence[Point], texts: Sequence[str], line: Sequence[Point]) -> None:
    """Write a text beside each point (data coordinates), as near as there is room, with a leader line if it is far.

    The limits of the axes must be set, and everything else drawn. line: corners of a polyline of horizontal and
    vertical segments that labels should not cross.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # computes the layout
    pixels = figure.dpi / 72
    places = [tuple(float(one) for one in axes.transData.transform(point)) for point in points]
    frame: Box = axes.get_window_extent(renderer).extents
    taken: list[Box] = [_around(x, y, _MARK * pixels, _MARK * pixels) for x, y in places]
    corners = [axes.transData.transform(corner) for corner in line]
    taken += [(*np.minimum(a, b) - 1, *np.maximum(a, b) + 1) for a, b in pairwise(corners)]
    for point, (x, y), text in zip(points, places, texts, strict=True):
        written = axes.annotate(text, point, (0, 0), textcoords="offset points", fontsize=_SIZE)
        extent = written.get_window_extent(renderer)
        best = min(
            _candidates(x, y, extent.width, extent.height, pixels),
            key=lambda one: sum(_overlap(one[1], box) for box in taken) + _outside(one[1], frame),
        )
        taken.append(best[1])
        offset = ((best[1][0] - x) / pixels, (best[1][1] - y) / pixels)
        written.remove()
        leader = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        written = axes.annotate(
            text, point, offset, textcoords="offset points", fontsize=_SIZE, va="bottom",
            arrowprops=leader if best[0] > _LEADER else None,
        )  # fmt: skip
        written.set_in_layout(False)


def _candidates(x: float, y: float, width: float, height: float, pixels: float) -> Iterator[tuple[int, Box]]:
    """(distance in points, box of the label), in order of preference."""
    for radius in _RADII:
        for angle in _ANGLES:
            turn = math.radians(angle)
            side, up = round(math.cos(turn), 3), round(math.sin(turn), 3)  # exactly 0 at multiples of 90 degrees
            middle_x = x + radius * pixels * side + math.copysign(width / 2, side) * bool(side)
            middle_y = y + radius * pixels * up + math.copysign(height / 2, up) * bool(up)
            yield radius, _around(middle_x, middle_y, width / 2, height / 2)


def _around(x: float, y: float, half_width: float, half_height: float) -> Box:
    return x - half_width, y - half_height, x + half_width, y + half_height


def _overlap(one: Box, other: Box) -> float:
    """The area of the intersection."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0) * max(height, 0)


def _outside(one: Box, frame: Box) -> float:
    """The area of a box outside the frame."""
    return (one[2] - one[0]) * (one[3] - one[1]) - _overlap(one, frame)
