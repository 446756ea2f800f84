from __future__ import annotations

import re
from pathlib import Path

from runner.files.printable import csv_cell, printable

ROOT = Path(__file__).resolve().parents[2]


def test_control_characters_are_escaped():
    assert printable("a\x1b[2Jb\n\u202e\udcff é…") == r"a\x1b[2Jb\n\u202e\udcff é…"
    assert printable("a\tb\nc\r", lines=True) == "a\tb\nc\\r"
    escaped = printable("\x1b\u009b")
    assert printable(escaped) == escaped


def test_csv_cells_are_not_formulas_and_numbers_stay_numbers():
    cells = ["=HYPERLINK(1)", "+x", "-x", "@x", "a=b", "-0.5", "+1e-3", "", -0.5, 3, True, None, "a\x1b"]
    expected = ["'=HYPERLINK(1)", "'+x", "'-x", "'@x", "a=b", "-0.5", "+1e-3", "", -0.5, 3, True, None, r"a\x1b"]
    assert [csv_cell(cell) for cell in cells] == expected


def test_commands_do_not_write_to_stderr_directly():
    """They may quote a run that somebody else made, so their messages must be escaped first."""
    rooms = ("comparing", "config", "history", "program", "records", "sweeps", "trials", "verbs")
    files = [path for room in rooms for path in (ROOT / "runner" / room).rglob("*.py")]
    direct = r"print\([^\n]*file=sys\.stderr|sys\.stderr\.write|file=sys\.stderr,\n"
    assert [str(path) for path in files if re.search(direct, path.read_text(encoding="utf-8"))] == []
