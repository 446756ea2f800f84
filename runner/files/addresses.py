"""Removes credentials in addresses and declared secrets from text before it is recorded or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
_SHORTEST = 4  # characters of a secret to search for: anything shorter occurs in ordinary words
_secrets: set[str] = set()
"""The secrets among the arguments of this process."""

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*\\?://)(\S*)")  # Hydra escapes the colon in a value of a sweep


def without_credentials(text: str) -> str:
    """Hide secrets in a text, and the user, the password and the query's values in each address.

    Everything between `://` and the last `@` is hidden: a password typed without escapes may contain `/`, `?` or `@`,
    and parsers disagree about its end. Hiding too much only makes an address harder to read.
    """
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    return _ADDRESS.sub(lambda match: match[1] + _hide(match[2]), text) if "://" in text else text


def keep_secret(text: str) -> None:
    """From now on, hide a text (an argument declared as a `Secret`) wherever credentials are hidden."""
    if len(text) >= _SHORTEST:
        _secrets.add(text)


def without_credentials_of(address: str, text: str) -> str:
    """Return a text without credentials, even those of a known address that appear outside of it."""
    remaining = address.partition("://")[2]
    user, at, host = remaining.rpartition("@")
    query = (host if at else remaining).partition("?")[2]
    parts = [user, user.partition(":")[2], *re.split("[=&]", query)[1::2], query]
    spelled = {spell(part) for part in parts for spell in (str, quote, unquote, partial(quote, safe=""))}
    for secret in sorted(spelled, key=len, reverse=True):
        text = text.replace(secret, HIDDEN) if len(secret) >= _SHORTEST else text
    return without_credentials(text)


def hidden_everywhere(value: Any) -> Any:
    """Return nested containers of plain values with the credentials in all their addresses hidden."""
    if isinstance(value, Mapping):
        return {key: hidden_everywhere(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden_everywhere(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def has_hidden(text: str) -> bool:
    """Return whether a text is a hidden secret, or an address whose credentials have been hidden."""
    return text == HIDDEN or ("://" in text and HIDDEN in text)


def _hide(location: str) -> str:
    if not location.startswith("/"):  # with a host; `sqlite:////home/me@work` has none
        _, at, host = location.rpartition("@")
        location = f"{HIDDEN}@{host}" if at else location
    before, mark, query = location.partition("?")
    if not mark:
        return location
    values = r"=[^&'\"]*" if "=" in query else r"^[^'\"]+"  # quotes around the address are kept
    return f"{before}?{re.sub(values, ('=' if '=' in query else '') + HIDDEN, query)}"
