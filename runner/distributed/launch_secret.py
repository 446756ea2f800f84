"""The secret that the ranks of a launch share: they accept only messages signed with it."""

from __future__ import annotations

import hashlib
import hmac

VARIABLE = "RUNNER_SECRET"
"""Environment variable that passes the secret to a rank. With torchrun, users may set it, equal on all machines."""

_DIGITS = 2 * hashlib.sha256().digest_size
_secret = b""


def use_secret(secret: str) -> None:
    """Sign and verify with a secret from now on. An empty secret protects nothing, because anybody can sign with it."""
    global _secret
    _secret = secret.encode()


def signed(name: str, text: str) -> str:
    """Return a signature followed by the text. `verified` accepts it only under the same key of the store, `name`."""
    return hmac.digest(_secret, f"{name}\n{text}".encode(), "sha256").hex() + text


def verified(name: str, stored: bytes) -> str:
    """Check that a process of this launch stored a text under the key `name`, and return it without its signature.

    Raises:
        PermissionError: the signature is missing or wrong.
    """
    text = stored[_DIGITS:].decode(errors="replace")
    if not hmac.compare_digest(signed(name, text).encode(), stored):
        raise PermissionError(
            f"{name} in the ranks' key-value store was written by a process outside this launch, and is rejected: "
            "find out who else has access to this machine"
        )
    return text
