from __future__ import annotations

import re
from pathlib import Path

from runner.files.printable import csv_cell, printable

ROOT = Path(__file__).resolve().parents[2]


def test_escapes_are_visible_and_harmless():
    assert printable("a\x1b[2Jb\n\u202e\udcff é…") == r"a\x1b[2Jb\n\u202e\udcff é…"
    assert printable("a\tb\nc\r", lines=True) == "a\tb\nc\\r"
    once = printable("\x1b\u009b")
    assert printable(once) == once


def test_cells_of_a_csv_file_are_no_formulas_and_numbers_stay_numbers():
    cells = ["=HYPERLINK(1)", "+x", "-x", "@x", "a=b", "-0.5", "+1e-3", "", -0.5, 3, True, None, "a\x1b"]
    kept = ["'=HYPERLINK(1)", "'+x", "'-x", "'@x", "a=b", "-0.5", "+1e-3", "", -0.5, 3, True, None, r"a\x1b"]
    assert [csv_cell(cell) for cell in cells] == kept


def test_messages_of_commands_go_through_one_function():
    """Of what may name anything in a run that somebody else has made."""
    rooms = ("comparing", "config", "history", "program", "records", "sweeps", "trials", "verbs")
    files = [path for room in rooms for path in (ROOT / "runner" / room).rglob("*.py")]
    direct = r"print\([^\n]*file=sys\.stderr|sys\.stderr\.write|file=sys\.stderr,\n"
    assert [str(path) for path in files if re.search(direct, path.read_text(encoding="utf-8"))] == []
