# SPDX-License-Identifier: Apache-2.0
"""slimrt forecast, with scripted engines."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from slimrt.cli import main
from slimrt.forecast.table import Columns, read_series
from test_forecast import CHRONOS, INFO, chronos_file, repeating
from test_transcribe import ScriptedEngine

SHIPPED = Path(__file__).parent.parent / "models"

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def values(text, columns=(), ids=None, tell=lambda text: None, **others):
    """The values of each series of a table called t."""
    read = read_series(text, "t", Columns(columns, ids, **others), tell)
    return {name: one.values for name, one in read.series.items()}


@pytest.fixture
def chronos(opened, tmp_path):
    path = chronos_file(tmp_path / "chronos.gguf", CHRONOS | {"kind": "t5"})
    return opened(path, lambda n_seqs: ScriptedEngine(repeating, n_seqs=n_seqs, **INFO))


def test_forecast(chronos, capsys, tmp_path, monkeypatch):
    model, _ = chronos
    table = tmp_path / "series.csv"
    table.write_text("day,a,b\n2020-01-01,1,10\n2020-01-02,2,\n2020-01-03,3,30\n".replace(",\n", ",20\n"))
    assert main(["forecast", model, str(table), "-n", "3", "--quantiles", "0.1,0.9", "--seed", "1"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["day", "0.1", "0.9"]
    assert [row[0] for row in rows[1:]] == ["2020-01-04", "2020-01-05", "2020-01-06"]
    both = ["forecast", model, str(table), "--column", "a", "--column", "3", "--seed", "1"]
    assert main([*both, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["series"]) == ["a", "b"] and record["horizon"] == 6
    assert np.array(record["series"]["b"]).shape == (6, 3)
    assert record["dates"]["b"][:2] == ["2020-01-04", "2020-01-05"] and len(record["dates"]["a"]) == 6
    assert main([*both, "--json", "--date-column", "none"]) == 0
    assert "dates" not in json.loads(capsys.readouterr().out)
    assert main([*both, "-o", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text().startswith("series,day,0.1,0.5,0.9\na,2020-01-04,")
    assert main([*both, "-o", str(tmp_path / "out.json")]) == 0 and main([*both, "--format", "json"]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(capsys.readouterr().out) == record
    for wrong, why in (("csv", "a format is --format csv"), ("out.csv", "out.csv and the format json do not go")):
        with pytest.raises(SystemExit, match="2"):
            main([*both, "--json", "-o", wrong])
        assert why in capsys.readouterr().err
    assert main(["forecast", model, str(table), "--column", "day"]) == 1
    assert "column day is not numbers: row 2 says '2020-01-01'" in capsys.readouterr().err


def test_levels_that_were_not_trained_are_named(capsys, tmp_path):
    (tmp_path / "s.csv").write_text("1\n2\n3\n")
    asked = ["forecast", str(SHIPPED / "tale-chronos.gguf"), str(tmp_path / "s.csv"), "-n", "1", "--quantiles"]
    assert main([*asked, "0.02,0.1,0.5,0.99"]) == 0
    captured = capsys.readouterr()
    head, row = (line.split(",") for line in captured.out.splitlines())
    assert head == ["step", "0.02 (as 0.1)", "0.1", "0.5", "0.99 (as 0.9)"]
    assert row[1] == row[2] != row[3] and "trained for quantiles 0.1 to 0.9" in captured.err
    assert "the nearest: 0.02, 0.99" in captured.err
    assert main([*asked, "0.1,0.5"]) == 0
    assert capsys.readouterr().err == ""


def test_forecast_plot(chronos, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    model, _ = chronos
    (tmp_path / "s.csv").write_text("1\n2\n3\n")
    assert main(["forecast", model, str(tmp_path / "s.csv"), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_rows_with_nothing_in_them_are_steps_without_a_value():
    """But not at the end, as spreadsheets leave them, nor where dates tell the steps; a blank line is no row."""
    np.testing.assert_equal(values("a,b\n1,2\n,\n3,4\n,\n,\n")["b"], [2, np.nan, 4])
    np.testing.assert_equal(values('y\n1\n""\n3\n""\n\n')["y"], [1, np.nan, 3, np.nan])  # as pandas writes it
    assert values("y\n1\n\n3\n")["y"].tolist() == [1, 3]
    assert values("day,y\n2020-01-01,1\n,\n2020-01-02,2\n,\n")["y"].tolist() == [1, 2]
    assert values("id,y\na,1\n,\nb,2\n", ids="id")["a"].tolist() == [1]


def test_what_stands_between_cells():
    """Excel names it in a line of its own; in a title that is quoted it means nothing."""
    assert values("sep=|\nday|y\n2020-01-01|1\n2020-01-02|2\n")["y"].tolist() == [1, 2]
    assert values('"day; time",y\n2020-01-01,1\n2020-01-02,2\n')["y"].tolist() == [1, 2]


def test_columns_of_a_table():
    text = "time,x,note,y\n1,1.5,a,\n2,nan,b,4\n"
    assert list(values(text)) == ["y"]
    x = values(text, ["x"])["x"]
    assert x[0] == 1.5 and np.isnan(x[1])
    assert values("1\n2\n")["1"].tolist() == [1.0, 2.0]
    for columns, why in [
        (["z"], "no column z; there are time, x, note, y"),
        (["note"], "column note is not numbers: row 2 says 'a'"),
    ]:
        with pytest.raises(ValueError, match=why):
            values(text, columns)
    for empty in ("", "a,b\n", "a\nx\n"):
        with pytest.raises(ValueError, match="no rows|no column of numbers"):
            values(empty)
    assert list(values("a,\n1,\n2,\n")) == ["a"]
    with pytest.raises(ValueError, match="column 2 is not numbers: nothing in it"):
        values("a,\n1,\n2,\n", ["2"])
    for text, why in (
        ("y\n1,000\n", "row 2 has 2 cells, the first has 1: is there a comma in a number"),
        ("d;y\nx;1,5\n", "y: row 2 says '1,5' .decimals take a point"),
    ):
        with pytest.raises(ValueError, match=why):
            values(text)
    with pytest.raises(ValueError, match="no column of numbers in it; day says when a row is$"):
        values("day\n2020-01-01\n2020-01-02\n")
    with pytest.raises(ValueError, match="no column of numbers in it; day: row 2 says 'Mon'; y: row 3 says 'inf'"):
        values("day,y\nMon,1\nTue,inf\n")


@pytest.mark.parametrize("sales", ['"1,234"', "2,5", "-"])
def test_a_column_that_is_numbers_but_for_some_cells_is_not_passed_over_in_silence(sales):
    told: list[str] = []
    table = f"day;store;sales\n2020-01-01;7;{sales}\n2020-01-02;7;3\n2020-01-03;7;4\n2020-01-04;8;5\n"
    assert list(values(table, tell=told.append)) == ["store"]
    assert len(told) == 1 and "column sales is not numbers: row 2 says" in told[0] and "store, is forecast" in told[0]
    assert list(values(table, ["store"], tell=told.append)) == ["store"] and len(told) == 1


def test_stacked_series():
    """Rows of an id are a series, wherever they are; without --id a column that looks like one is named."""
    text = "item_id,day,a,y\nB,1,1,10\nB,2,2,20\nA,1,3,30\nA,2,4,40\n"
    told: list[str] = []
    assert values(text, tell=told.append)["y"].tolist() == [10, 20, 30, 40]
    assert len(told) == 1 and "--id item_id" in told[0]
    mixed = text + "B,3,,50\n"
    series = values(mixed, (), "item_id", told.append)
    assert {name: values.tolist() for name, values in series.items()} == {"B": [10, 20, 50], "A": [30, 40]}
    assert list(values(mixed, ["y", "a"], "1")) == ["B y", "B a", "A y", "A a"]
    assert len(told) == 1
    for plain in ("season,y\nwet,1\nwet,2\ndry,3\nwet,4\n", "day,y\nMon,1\nTue,2\n", "year,y\n1,1\n1,2\n2,3\n2,4\n"):
        values(plain, tell=told.append)
    assert len(told) == 1
    for columns, ids, why in (
        (None, "x", "no column x; there are item_id, day, a, y"),
        (["a"], "a", "column a is not numbers: it tells series apart"),
    ):
        with pytest.raises(ValueError, match=why):
            values(text, columns or (), ids)
    with pytest.raises(ValueError, match="row 6 has nothing in column item_id"):
        values(text + ",3,5,50\n", (), "item_id")
    by_date = "item_id,day,y\n" + "".join(f"{one},2020-01-0{day},{day}\n" for day in (1, 2, 3) for one in "BA")
    with pytest.raises(ValueError, match="the date of another row.*tell them apart with --id"):
        values(by_date, tell=told.append)
    assert len(told) == 1, told[1:]  # the column of dates is none of ids


@pytest.mark.parametrize("between, end", [(",", "\r"), (";", "\r\n"), ("\t", "\n")])
def test_tables_of_other_programs(between, end):
    """Any ends of lines, a byte order mark, columns called by a year, by nothing or alike."""
    lines = ["\ufeffmonth,2020,,a,a", "2019-01,1,2,3,4", "2019-02,5,6,7", ""]
    text = end.join(line.replace(",", between) for line in lines)
    assert {name: values[0] for name, values in values(text, ["2020", "3", "4", "5"]).items()} == {
        "2020": 1.0, "3": 2.0, "4": 3.0, "5": 4.0,
    }  # fmt: skip
    assert np.isnan(values(text)["5"][1])
    assert values(text.replace(f"month{between}2020", f"2018-12{between}9"), ["2"])["2"].tolist() == [9, 1, 5]


def test_a_missing_model_is_told_before_a_missing_table(capsys, tmp_path):
    assert main(["forecast", str(tmp_path / "none.gguf"), str(tmp_path / "none.csv")]) == 1
    assert "none.gguf: no such file" in capsys.readouterr().err
