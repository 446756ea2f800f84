"""Removes credentials from addresses before they are recorded or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*\\?://)(\S*)")  # Hydra escapes the colon in a value of a sweep


def without_credentials(text: str) -> str:
    """Return a text with the user, the password and the values of the query of each address hidden.

    Everything between `://` and the last `@` is hidden: a password that was typed without escapes may contain `/`, `?`
    or `@`, and parsers disagree about where it ends. Hiding too much only makes an address harder to read.
    """
    return _ADDRESS.sub(lambda found: found[1] + _hide(found[2]), text) if "://" in text else text


def without_those_of(address: str, text: str) -> str:
    """Return a text without credentials, also where those of a known address occur without that address."""
    rest = address.partition("://")[2]
    user, at, host = rest.rpartition("@")
    query = (host if at else rest).partition("?")[2]
    parts = [user, user.partition(":")[2], *re.split("[=&]", query)[1::2], query]
    spelled = {spell(part) for part in parts for spell in (str, quote, unquote, partial(quote, safe=""))}
    for one in sorted(spelled, key=len, reverse=True):
        text = text.replace(one, HIDDEN) if len(one) > 3 else text  # anything shorter occurs in ordinary words
    return without_credentials(text)


def hidden_everywhere(value: Any) -> Any:
    """Return nested containers of plain values with the credentials in all their addresses hidden."""
    if isinstance(value, Mapping):
        return {key: hidden_everywhere(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden_everywhere(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def has_hidden(address: str) -> bool:
    """Return whether the credentials of an address have been hidden."""
    return "://" in address and HIDDEN in address


def _hide(rest: str) -> str:
    if not rest.startswith("/"):  # with a host; `sqlite:////home/me@work` has none
        _, at, host = rest.rpartition("@")
        rest = f"{HIDDEN}@{host}" if at else rest
    before, mark, query = rest.partition("?")
    if not mark:
        return rest
    values = r"=[^&'\"]*" if "=" in query else r"^[^'\"]+"  # quotes around the address are kept
    return f"{before}?{re.sub(values, ('=' if '=' in query else '') + HIDDEN, query)}"
