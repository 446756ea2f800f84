"""Makes other people's text safe for a terminal, a log or a spreadsheet."""

from __future__ import annotations

from contextlib import suppress


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return text with control characters and unprintable ones shown as escapes, such as `\x1b`.

    Text from files, names and errors goes through here before it is printed: other people may have written it, and it
    must not control the terminal. `lines` keeps line breaks and tabs.
    """
    kept = "\n\t" if lines else ""
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode() for char in str(text)
    )


def csv_cell(value: object) -> object:
    """Return a value for a CSV file; text has no control characters and cannot run as a formula in a spreadsheet."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
