"""Durations and tables as text."""

from __future__ import annotations

import time

import pytest

from runner.terminal.text import Column, draw_table, show_seconds


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0.123, "0.1 s"), (4.23, "4.2 s"), (12.4, "12 s"), (59.6, "60 s"), (99.0, "99 s"), (240, "4 min")),
        *((600, "10 min"), (7800, "2 h 10 min"), (864000, "10.0 days"), (float("nan"), "?"), (-1, "?"), (1e300, "?")),
    ],
)
def test_durations_are_shown_in_readable_units(seconds: float, shown: str):
    assert show_seconds(seconds) == shown


def test_a_table_aligns_numbers_right_and_titles_at_the_bottom():
    table = [Column(["run"], ["a", "bcd"]), Column(["eval/", "loss"], ["0.5", "10"], is_number=True)]
    assert draw_table(table) == ["     eval/", "run   loss", "a      0.5", "bcd     10"]


def test_the_time_to_draw_a_table_is_linear_in_its_rows():
    def seconds(rows: int) -> float:
        start_time = time.process_time()
        draw_table([Column(["run"], ["outputs"] * rows), Column(["loss"], ["0.5"] * rows, is_number=True)])
        return time.process_time() - start_time

    assert seconds(10_000) < 100 * max(seconds(500), 1e-4)  # 20 times the rows; a quadratic time would be 400-fold
