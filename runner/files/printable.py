"""Text of others, made safe to be shown: on a terminal, in a log, or in a spreadsheet."""

from __future__ import annotations

from contextlib import suppress


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return text with control characters and unprintable ones shown as escapes, such as `\x1b`.

    What comes from files, names and errors goes through here before it is printed: someone else may have written it,
    and it must not steer the terminal. `lines` keeps ends of lines and tabs.
    """
    kept = "\n\t" if lines else ""
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode() for char in str(text)
    )


def csv_cell(value: object) -> object:
    """Return a value for a CSV file: text without escapes, and without what a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
