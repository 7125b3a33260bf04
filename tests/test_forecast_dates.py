# SPDX-License-Identifier: Apache-2.0
"""Dates of tables: read where one reading is possible, put in order, checked, and gone on with."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from slimrt.forecast.frequency import named
from slimrt.forecast.table import Columns, read_series

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def table(dates: str, title: str = "day") -> str:
    """A table whose rows have these dates, and their numbers as values."""
    return f"{title};y\n" + "".join(f"{date};{i}\n" for i, date in enumerate(dates.split("|")))


def read(texts: str, title: str = "day", **columns):
    """Values, the next three dates, and what was said."""
    said: list[str] = []
    series = read_series(table(texts, title), "t.csv", Columns(**columns), said.append).series["y"]
    return series.values.tolist(), series.timeline and series.timeline.future(3), said


@pytest.mark.parametrize(
    ("dates", "next_ones"),
    [
        ("2020-01|2020-02|2020-03", "2020-04|2020-05|2020-06"),
        ("2019-12-31|2020-01-31|2020-02-29", "2020-03-31|2020-04-30|2020-05-31"),  # month ends, in a leap year too
        ("31.10.2019|30.11.2019|31.12.2019|31.01.2020", "29.02.2020|31.03.2020|30.04.2020"),
        ("2020-01-15|2020-02-15|2020-03-15", "2020-04-15|2020-05-15|2020-06-15"),
        ("2020-01-30|2020-02-29|2020-03-30|2020-04-30|2020-05-30", "2020-06-30|2020-07-30|2020-08-30"),
        ("2020Q1|2020Q2|2020Q3", "2020Q4|2021Q1|2021Q2"),
        ("Q3 2020|Q4 2020|Q1 2021", "Q2 2021|Q3 2021|Q4 2021"),
        ("2020-03-31|2020-06-30|2020-09-30", "2020-12-31|2021-03-31|2021-06-30"),
        ("2020-02-29|2021-02-28|2022-02-28|2023-02-28", "2024-02-29|2025-02-28|2026-02-28"),
        ("2020-01-01|2020-01-02|2020-01-03", "2020-01-04|2020-01-05|2020-01-06"),  # days: no weekend was left out
        ("2020-01-02|2020-01-03|2020-01-06|2020-01-07|2020-01-08|2020-01-09", "2020-01-10|2020-01-13|2020-01-14"),
        ("2020-02-01|2020-02-08|2020-02-15|2020-02-22|2020-02-29", "2020-03-07|2020-03-14|2020-03-21"),
        ("1/14/2020 2:00 PM|1/14/2020 3:00 PM", "01/14/2020 04:00 PM|01/14/2020 05:00 PM|01/14/2020 06:00 PM"),
        ("2020-01-01T23:15Z|2020-01-01T23:30Z", "2020-01-01T23:45Z|2020-01-02T00:00Z|2020-01-02T00:15Z"),
        ("31/12/2020|01/01/2021|02/01/2021", "03/01/2021|04/01/2021|05/01/2021"),  # the first row tells day from month
        ("5 Jan 2020|12 Jan 2020|19 Jan 2020", "26 Jan 2020|02 Feb 2020|09 Feb 2020"),
        ("Jan-20|Feb-20|Mar-20", "Apr-20|May-20|Jun-20"),
        ("20201230|20201231|20210101", "20210102|20210103|20210104"),
        ("1600000000|1600003600|1600007200", "1600010800|1600014400|1600018000"),
        ("2019|2020|2021", "2022|2023|2024"),
        ("2020-W51|2020-W52|2020-W53", "2021-W01|2021-W02|2021-W03"),
        ("2020W525|2020W526|2020W527", "2020W531|2020W532|2020W533"),
        ("2020-01-01T00:00:00.0000|2020-01-01T00:00:00.0005",
         "2020-01-01T00:00:00.001000|2020-01-01T00:00:00.001500|2020-01-01T00:00:00.002000"),
        ("2020-01-01 00:00|2020-01-01 00:00:00.25|2020-01-01 00:00:00.5",
         "2020-01-01 00:00:00.750|2020-01-01 00:00:01.000|2020-01-01 00:00:01.250"),
    ],
)  # fmt: skip
def test_what_comes_next(dates, next_ones):
    values, future, said = read(dates)
    assert future == next_ones.split("|") and values == list(range(len(values))) and not said


def test_clocks_that_are_changed():
    """Hours count UTC, days the calendar; the offset is that of the last row, which is said."""
    hours = "2020-03-29T00:00+01:00|2020-03-29T01:00+01:00|2020-03-29T03:00+02:00"
    values, future, said = read(hours)
    assert values == [0, 1, 2] and "offset from UTC changes" in said[0]
    assert future == ["2020-03-29T04:00+02:00", "2020-03-29T05:00+02:00", "2020-03-29T06:00+02:00"]
    values, future, _ = read("2020-03-28T00:00+01:00|2020-03-29T00:00+01:00|2020-03-30T00:00+02:00")
    assert values == [0, 1, 2] and future[0] == "2020-03-31T00:00+02:00"
    with pytest.raises(ValueError, match="row 4 .* the date of another row.* write offsets from UTC"):
        read("2020-10-25 01:00|2020-10-25 02:00|2020-10-25 02:00|2020-10-25 03:00")


def test_rows_are_put_in_order():
    values, future, said = read("2020-04|2020-03|2020-02|2020-01")
    assert values == [3, 2, 1, 0] and future[0] == "2020-05"
    assert said == ["t.csv: the newest row comes first: reversed, oldest first"]
    values, future, said = read("2020-02|2020-01|2020-03")
    assert values == [1, 0, 2] and said == ["t.csv: rows are not in the order of their dates: sorted, oldest first"]


def test_missing_rows_are_missing_values():
    values, future, said = read("2020-01-01|2020-01-02|2020-01-05|2020-01-06")
    np.testing.assert_equal(values, [0, 1, np.nan, np.nan, 2, 3])
    assert future[0] == "2020-01-07"
    assert said == ["t.csv: 2 of 6 days are missing, behind row 3 (2020-01-02): taken as missing values"]


@pytest.mark.parametrize(
    ("dates", "why"),
    [
        ("01/02/2020|01/03/2020", "01/02/2020 may be 1 February 2020 .%d/%m/%Y. or 2 January 2020 .*--date-format"),
        ("01/02/20|01/03/20", "--date-format"),
        ("2020-01-01|2020-01-02|2020-01-02", "row 4 .2020-01-02.: the date of another row.*--id"),
        ("2020-01-01|2020-01-02|total|2020-01-04", "row 4 says 'total', not a date as the others"),
        ("2020-01-01|2020-01-02||2020-01-04", "row 4 says '', not a date as the others"),
        (
            "2020-01-01|2020-01-02|2020-01-03 07:00|2020-01-04|2020-01-05",
            "row 4 .*: not at a step of the others .days.: --freq",
        ),
        ("2020-01-01|2020-01-02|2020-01-09", "6 of 9 days are missing, behind row 3 .2020-01-02.: name the step"),
        ("1600000000|1600000001|1600000002|1900000000", "299999997 of 300000001 seconds are missing"),  # takes no room
        ("2020-01-01", "1 date does not give a frequency: name it"),
        ("2020-01-01|2020-01-01|2020-01-01", "1 date does not give a frequency, and 3 rows have it: name it"),
    ],
)
def test_what_is_refused(dates, why):
    with pytest.raises(ValueError, match=why) as error:
        read(dates)
    assert "t.csv: " in str(error.value)
    assert read(dates, dates="none")[:2] == (list(range(dates.count("|") + 1)), None)


@pytest.mark.parametrize("dates", ["9999-10|9999-11", "31.12.9997|31.12.9998", "9999-12-31T21:00Z|9999-12-31T22:00Z"])
def test_no_dates_follow_the_year_9999(dates):
    series = read_series(table(dates), "t.csv").series["y"]
    assert "9999" in series.timeline.future(1)[0]
    for steps in (2, 300_000):
        with pytest.raises(ValueError, match="beyond the year 9999, where dates end: give a smaller --horizon"):
            series.timeline.future(steps)


def test_a_form_or_a_frequency_that_is_insisted_on():
    assert read("01/02/2020|01/03/2020", form="%d/%m/%Y")[1] == ["01/04/2020", "01/05/2020", "01/06/2020"]  # months
    assert read("01/02/2020|01/05/2020", form="%m/%d/%Y")[1] == ["01/08/2020", "01/11/2020", "01/14/2020"]  # days
    values, future, said = read("2020-01-30|2020-02-27|2020-04-28", freq="ME")
    np.testing.assert_equal(values, [0, 1, np.nan, 2])
    assert future == ["2020-05-31", "2020-06-30", "2020-07-31"]
    assert "row 2 (2020-01-30), row 3 (2020-02-27)" in said[0] and "1 of 4 month ends are missing" in said[1]
    assert read("2020-01-01", freq="d")[1] == ["2020-01-02", "2020-01-03", "2020-01-04"]
    with pytest.raises(ValueError, match="row 3 .2020-01-31.: in the same step"):
        read("2020-01-30|2020-01-31", freq="MS")
    with pytest.raises(ValueError, match="frequency 'M' is not supported.*MS, ME"):
        read("2020-01-30|2020-01-31", freq="M")
    with pytest.raises(ValueError, match="row 2 says '2020', row 3 says '2021', not a date as '%d"):
        read("2020|2021", form="%d.%m.%Y")
    with pytest.raises(ValueError, match="no column of dates in it; there are x, y"):
        read("1|2", "x", freq="D")
    with pytest.raises(ValueError, match="column x says '1', which is not known as a date"):
        read("1|2", "x", dates="x")


def test_names_of_steps_are_those_of_pandas():
    pandas = pytest.importorskip("pandas")
    for name in ("s", "15min", "h", "D", "2D", "B", "W", "MS", "ME", "2ME", "QS", "QE", "YS", "YE"):
        dates = pandas.date_range("2020-01-31 06:00", periods=40, freq=name)
        wanted = dates[10:].to_numpy("M8[us]")
        frequency = named(name, dates[:10].to_numpy("M8[us]"))
        first = frequency.places(dates[:1].to_numpy("M8[us]"))[0]
        np.testing.assert_array_equal(frequency.moments(first + np.arange(10, 40)), wanted, err_msg=name)


def test_a_number_is_a_date_only_where_the_title_says_so():
    assert read("2019|2020|2021", "x")[1] is None
    assert read("2019|2020|2021", "x", dates="x")[1] == ["2022", "2023", "2024"]
    assert read("1|2|3", "year")[1] is None


def test_years_of_two_digits_are_those_that_follow_each_other():
    """strptime's go from 1969 to 2068."""
    assert read("Jan-67|Jan-68|Jan-69|Jan-70|Jan-71")[:2] == ([0, 1, 2, 3, 4], ["Jan-72", "Jan-73", "Jan-74"])
    values, future, said = read("Jan-70|Jan-69|Jan-68|Jan-67")
    assert values == [3, 2, 1, 0] and future[0] == "Jan-71" and "the newest row comes first" in said[0]
    assert read("Jan-98|Jan-99|Jan-00|Jan-01")[1][0] == "Jan-02"
    assert read("29-Feb-00|01-Mar-00|02-Mar-00")[1][0] == "03-Mar-00"


def test_years_of_two_digits_in_stacked_series():
    """All are of the same hundred years."""

    def stacked(**years: range) -> dict[str, tuple[object, str]]:
        rows = [f"{name},1/31/{year % 100:02d},{year}\n" for name, those in years.items() for year in those]
        found = read_series("id,day,y\n" + "".join(rows), "t", Columns(ids="id")).series
        return {name: (one.timeline.past(1)[0].astype("M8[Y]").item().year, one.timeline.future(1)[0])
                for name, one in found.items()}  # fmt: skip

    old, new = range(1960, 1975), range(1995, 2010)
    assert stacked(a=old, b=old) == {"a": (1974, "01/31/75"), "b": (1974, "01/31/75")}
    assert stacked(a=old, b=range(1960, 1966)) == {"a": (1974, "01/31/75"), "b": (1965, "01/31/66")}
    assert stacked(a=old, b=new) == {"a": (1974, "01/31/75"), "b": (2009, "01/31/10")}
    assert stacked(a=range(2010, 2020), b=range(2012, 2015))["b"] == (2014, "01/31/15")
    assert stacked(a=reversed(old), b=old)["a"] == (1974, "01/31/75")
    assert stacked(a=range(1950, 2011), b=old) == {"a": (2010, "01/31/11"), "b": (1974, "01/31/75")}


def test_years_of_two_digits_in_no_order_lie_close_together():
    values, future, said = read("Jan-67|Jan-70|Jan-66|Jan-69|Jan-68")
    assert values == [2, 0, 4, 3, 1] and future[0] == "Jan-71" and said[0].endswith("sorted, oldest first")
    assert read("Jan-00|Jan-99|Jan-01")[:2] == ([1, 0, 2], ["Jan-02", "Jan-03", "Jan-04"])


def test_a_column_that_is_called_a_date_and_is_none_is_said():
    for dates in ("12:00|13:00|14:00", "3|2|1", "45292|45293|45297", "45292|45293|45293"):
        values, future, said = read(dates, "time")
        assert values == [0, 1, 2] and future is None
        assert len(said) == 1 and f"column time says '{dates.split('|')[0]}', which is not known as a date" in said[0]
        assert read(dates, "time", dates="none")[2] == read(dates, "hour")[2] == []
    assert "a spreadsheet's day numbers want a format of dates" in read("45293|45292", "time")[2][0]
    for dates in (
        "45292|45299|45306",
        "0.1|0.2|0.4",
        "1|1|2|2",
        "45292||45294",
        "7",
    ):  # they say what the order of rows says
        assert read(dates, "time")[1:] == (None, [])


def test_stacked_series_have_dates_of_their_own():
    text = "id,day,y\nB,2020-03,3\nB,2020-02,2\nB,2020-01,1\nA,2021-01,1\nA,2021-02,2\nA,2021-04,3\n"
    said: list[str] = []
    series = read_series(text, "t", Columns(ids="id"), said.append).series
    assert series["B"].values.tolist() == [1, 2, 3] and series["B"].timeline.future(1) == ["2020-04"]
    assert len(series["A"].values) == 4 and series["A"].timeline.future(1) == ["2021-05"]
    assert said[0] == "t: series B: the newest row comes first: reversed, oldest first"
    assert said[1].startswith("t: series A: 1 of 4 month starts are missing, behind row 6 (2021-02)")
    short = text + "C,2022-07,5\n"
    assert read_series(short, "t", Columns(ids="id")).series["C"].timeline.future(1) == ["2022-08"]  # as the others


@pytest.mark.unsanitized  # whose shadow of memory Python does not see
def test_a_row_of_a_table_takes_few_hundred_bytes_while_it_is_read():
    """Measured: 280 for a date and a value; it was 384, of which the text took four bytes a character."""
    hours = np.datetime64("2000-01-01T00", "s") + np.arange(5000) * np.timedelta64(3600, "s")
    text = "date,value\n" + "".join(f"{one},{i * 0.37:.4f}\n" for i, one in enumerate(hours))
    tracemalloc.start()
    try:
        read_series(text, "a.csv")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / len(hours) < 340
