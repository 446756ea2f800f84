"""Suggests valid times for text that is not one. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from difflib import get_close_matches

_TYPED = re.compile(r"-?\s*([0-9]*[.]?[0-9]+(?:e-?[0-9]{1,2})?)\s*([a-z%]*)")


def nearest_times(text: str, units: Mapping[str, str]) -> list[str]:
    """Return the time strings nearest to the typed text, if any. `units` maps words, such as 'hour', to units."""
    match = _TYPED.fullmatch(text.strip().lower())
    words = get_close_matches(match[2] or "ep", units, n=1) if match else []
    if not match or not words:
        return []
    unit = units[words[0]]
    number = Decimal(match[1]) / (100 if match[2] == "%" else 1)
    if unit == "dur" or (number < 1 and not match[2]):
        number = min(number, Decimal(1))
        unit = "dur"
    numbers = (number,) if unit in ("dur", "sec", "h", "m", "s") else (math.floor(number), math.ceil(number))
    return [*dict.fromkeys(f"{Decimal(number).normalize():f}{unit}" for number in numbers if number)]
