"""Encodes logged values as JSON lines, fast enough for every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson


def encode_line(entry: Mapping[str, Any], otherwise: Callable[[Mapping[str, Any]], str]) -> bytes:
    """Return an entry of strings, numbers and nested dicts as a line of JSON.

    orjson takes a tenth of the time of the standard library. But it writes NaN and infinity as null, and it does not
    escape characters outside ASCII: `str.splitlines` splits at some of them, and not every reader expects UTF-8.

    Args:
        entry: plain values by key, without None.
        otherwise: encodes the entry as ASCII when orjson cannot: a number is not finite or has more than 64 bits, or
            a string is not ASCII, or a key is not a string.
    """
    try:
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        line = b"null"
    return line if line.isascii() and b"null" not in line else (otherwise(entry) + "\n").encode()
