"""Signs files with this user's key, to tell them from other people's. Standard library only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("runner")


def sign(contents: Sequence[bytes]) -> str | None:
    """Return this user's signature of some contents; if there is no key, warn and return None."""
    try:
        key = _user_key()
    except (OSError, RuntimeError) as error:
        log.warning("the record is not signed, so resume and rerun will ask before using your classes: %s", error)
        return None
    lengths = b"".join(len(content).to_bytes(8) for content in contents)
    return hmac.new(key, lengths + b"".join(contents), hashlib.sha256).hexdigest()


def is_signed(signature: bytes, contents: Sequence[bytes]) -> bool:
    """Return whether a signature of some contents is this user's."""
    expected = sign(contents)
    return expected is not None and hmac.compare_digest(signature, expected.encode())


def _user_key() -> bytes:
    """Return this user's secret key, which the first call creates.

    Raises:
        OSError, RuntimeError: there is no writable home folder, or the key in it is too short.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(base) / "exactrun" / "key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".key.{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):  # another process was quicker
            os.link(partial, path)
        partial.unlink()
    key = path.read_bytes()
    if len(key) < 32:
        raise OSError(f"{path} does not contain a key; remove it")
    return key
