"""Encodes as JSON lines what is logged in every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson


def encode_line(entry: Mapping[str, Any], otherwise: Callable[[Mapping[str, Any]], str]) -> bytes:
    """Return an entry of strings, numbers and nested dicts as a line of JSON.

    orjson takes a tenth of the time of the standard library. But it writes NaN and infinity as null, and it leaves
    characters outside ASCII as they are: `str.splitlines` takes some of them for line ends, and not every reader
    decodes files as UTF-8.

    Args:
        entry: entry of plain values, none of which is None.
        otherwise: encodes the entry as ASCII where orjson cannot: when a number is not finite or has more than 64
            bits, or a key is not a string or not ASCII.
    """
    try:
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        line = b"null"
    return line if line.isascii() and b"null" not in line else (otherwise(entry) + "\n").encode()
