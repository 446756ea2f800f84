"""The secret of a launch: ranks accept only messages that were signed with it."""

from __future__ import annotations

import hashlib
import hmac

VARIABLE = "RUNNER_SECRET"
"""Environment variable that passes the secret to a rank; under torchrun, users may set it, equal on all machines."""

_DIGITS = 2 * hashlib.sha256().digest_size
_secret = b""


def use_secret(secret: str) -> None:
    """Sign and verify with a secret from now on. With an empty one, anybody can sign."""
    global _secret
    _secret = secret.encode()


def signed(name: str, text: str) -> str:
    """Return a text with a signature in front that `verified` accepts only under this key of the store."""
    return hmac.digest(_secret, f"{name}\n{text}".encode(), "sha256").hex() + text


def verified(name: str, stored: bytes) -> str:
    """Return the text that a process of this launch stored under a key, without its signature.

    Raises:
        PermissionError: the signature is missing or wrong.
    """
    text = stored[_DIGITS:].decode(errors="replace")
    if not hmac.compare_digest(signed(name, text).encode(), stored):
        raise PermissionError(
            f"{name} in the store of the ranks was written by a process outside this launch, so it is rejected: "
            "find out who else has access to this machine"
        )
    return text
