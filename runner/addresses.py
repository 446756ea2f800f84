"""Addresses without the credentials in them, as they may be written down and shown. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S*)")


def without_credentials(text: str) -> str:
    """Return a text in which no address has a user or a password, nor values behind its `?`.

    A password may hold `/`, `?` or `@` as it was typed, where parsers disagree on its end: all between `://` and the
    last `@` counts as one. What is hidden too much only reads worse.
    """
    return _ADDRESS.sub(lambda found: found[1] + _hide(found[2]), text) if "://" in text else text


def without_those_of(address: str, text: str) -> str:
    """Return a text without credentials, and without those of an address where they stand alone, as in parts of it."""
    rest = address.partition("://")[2]
    user, at, host = rest.rpartition("@")
    query = (host if at else rest).partition("?")[2]
    parts = [user, user.partition(":")[2], *re.split("[=&]", query)[1::2], query]
    spelled = {spell(part) for part in parts for spell in (str, quote, unquote, partial(quote, safe=""))}
    for one in sorted(spelled, key=len, reverse=True):
        text = text.replace(one, HIDDEN) if len(one) > 3 else text  # less is found everywhere
    return without_credentials(text)


def hidden_everywhere(value: Any) -> Any:
    """Return nested plain values with the credentials taken out of all addresses in them."""
    if isinstance(value, Mapping):
        return {key: hidden_everywhere(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden_everywhere(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def has_hidden(address: str) -> bool:
    """Whether an address is one from which credentials were taken."""
    return "://" in address and HIDDEN in address


def _hide(rest: str) -> str:
    if not rest.startswith("/"):  # with a host; `sqlite:////home/me@work` has none
        _, at, host = rest.rpartition("@")
        rest = f"{HIDDEN}@{host}" if at else rest
    before, mark, query = rest.partition("?")
    if not mark:
        return rest
    values = r"=[^&'\"]*" if "=" in query else r"^[^'\"]+"  # quotes around the address stay
    return f"{before}?{re.sub(values, ('=' if '=' in query else '') + HIDDEN, query)}"
