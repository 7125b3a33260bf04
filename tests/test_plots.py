# SPDX-License-Identifier: Apache-2.0
"""Pictures: what stands in them, where, and that labels cover nothing."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from slimrt.forecast.plot import plot_forecast
from slimrt.forecast.table import Columns, read_series
from slimrt.measure import plots
from slimrt.results import CacheComparison, CacheQuality

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.dates import date2num  # noqa: E402  (after the check that it is there)
from matplotlib.text import Text  # noqa: E402

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.fixture
def figure(monkeypatch):
    """The figure that was drawn last, as figure()."""
    drawn = []

    def keep(made, target):
        drawn.append(made)
        made.savefig(target)  # places what is to be placed

    for module in ("slimrt.measure.plots", "slimrt.forecast.plot"):
        monkeypatch.setattr(f"{module}.save", keep)
    return lambda: drawn[-1]


def quality(cache: str, size: int, kl: float, refused: str = "") -> CacheQuality:
    return CacheQuality(cache=cache, modes=(), types=(), ranks=(), residual_types=(), perplexity=1.0, kl_mean=kl,
                        kl_p99=kl, kl_max=kl, same_top=1.0, bytes_per_token=size, cache_bytes=0, extra_weights=0,
                        too_imprecise=refused)  # fmt: skip


ROWS = (quality("kv f32", 8192, 0.0), quality("kv f16", 4096, 1e-8), quality("k q8", 1088, 5.8, "loses 692 % of V"),
        quality("kv q4", 1280, 1.8e-3), quality("kv q4, K per channel", 1280, 1.7e-3), quality("kv q8", 2176, 4.9e-6),
        quality("k+r q8 + 48 q8", 1248, 5.7e-6), quality("k+r q8 + 64 q4", 1200, 6.0e-6),
        quality("x q4", 1100, float("inf")))  # fmt: skip


def test_a_cache_that_is_refused_is_not_on_the_front():
    comparison = CacheComparison("m", 1, 1, 8, 1, 1, ROWS[:4])
    assert [row.cache for row in comparison.front()] == ["kv q4", "kv f16", "kv f32"]


def test_the_front(figure, tmp_path):
    """Colours are explained, no label covers another or a point, and what is lost does not stretch the axis."""
    plots.plot_front(CacheComparison("m.gguf", 9, 1, 8, 1, 1, ROWS), tmp_path / "front.png")
    axes = figure().axes[0]
    low, high = axes.get_ylim()
    assert 1e-9 < low < 1e-8 and 1e-3 < high < 1e-1  # not the 5.8 of k q8
    marks = {line.get_xdata()[0]: line for line in axes.lines if line.get_marker() not in ("None", None, "")}
    assert marks[1088].get_ydata()[0] == high and marks[1088].get_marker() == "^"
    assert marks[1100].get_ydata()[0] == high and marks[1088].get_color() != marks[1100].get_color()
    texts = {text.get_text(): text for text in axes.texts}
    assert set(texts) == {row.cache for row in ROWS[1:]} - {"k q8", "x q4"} | {"k q8: KL 5.8", "x q4: KL inf"}
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line that leads to it
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    middles = [axes.transData.transform((line.get_xdata()[0], line.get_ydata()[0])) for line in marks.values()]
    assert not any(box.contains(*middle) for box in boxes for middle in middles)
    said = [text.get_text() for text in figure().legends[0].get_texts()]
    assert said[0] == "on the Pareto front" and said[2].startswith("refused") and said[3] == "kv f16 = 100 %"
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert "4096\n100 %" in ticks and "2048\n50 %" in ticks


def forecast(figure, tmp_path, text: str, levels=(0.1, 0.5, 0.9), **columns):
    """The figure of a forecast of two steps, and what was said."""
    read = read_series(text, "t.csv", Columns(**columns))
    rows = np.array([[[10.0 * (i + 1) + level for level in levels]] * 2 for i in range(len(read.series))], np.float32)
    told = plot_forecast(read, rows, levels, "t.csv: 2 steps", tmp_path / "p.png")
    return figure(), told


def test_a_forecast(figure, tmp_path):
    """It begins where the last value is, over dates, in words."""
    drawn, told = forecast(figure, tmp_path, "month,sales\n2020-01,3\n2020-02,4\n2020-03,5\n2020-04,\n")
    axes = drawn.axes[0]
    past, median = axes.lines
    assert told == "" and past.get_label() == "history" and median.get_label() == "median"
    assert median.get_ydata().tolist() == pytest.approx([5, 10.5, 10.5])
    wanted = date2num(np.array(["2020-03-01", "2020-05-01", "2020-06-01"], "M8[D]"))
    assert date2num(median.get_xdata()).tolist() == wanted.tolist()
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["history", "80 %", "median"]
    assert axes.get_xlabel() == "month" and drawn.get_supylabel() == "sales"
    assert drawn.get_suptitle() == "t.csv: 2 steps"


def test_bands_are_called_what_they_are(figure, tmp_path):
    drawn, _ = forecast(figure, tmp_path, "1\n2\n3\n", levels=(0.1, 0.25, 0.4, 0.9))
    said = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert said == ["history", "80 %", "0.25 to 0.4", "quantile 0.4"] and drawn.axes[0].get_xlabel() == "step"


@pytest.mark.parametrize("n", [2, 7, 30])
def test_many_series_are_small_multiples(figure, tmp_path, n):
    """One legend, one axis of time, a height that grows, and a limit that is said."""
    names = [f"s{i}" for i in range(n)]
    text = "\n".join([",".join(["day", *names]), *(f"2020-01-0{d}," + ",".join(["1"] * n) for d in range(1, 5))])
    drawn, told = forecast(figure, tmp_path, text, values=names)
    shown = min(n, 24)
    assert told == ("the first 24 of 30 series are drawn" if n == 30 else "")
    assert [axes.get_title(loc="left") for axes in drawn.axes] == names[:shown]
    assert len(drawn.legends) == 1 and all(axes.get_legend() is None for axes in drawn.axes)
    assert len({axes.get_xlim() for axes in drawn.axes}) == 1
    assert all(axes.get_position().height * drawn.get_figheight() > 1 for axes in drawn.axes)  # inches
    labelled = [axes.get_title(loc="left") for axes in drawn.axes if axes.get_xlabel()]
    assert labelled == names[:shown][-{2: 1, 7: 2, 30: 3}[n] :]
