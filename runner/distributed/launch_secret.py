"""The secret of a launch: who does not know it cannot write what ranks take from the store in which they meet."""

from __future__ import annotations

import hashlib
import hmac

VARIABLE = "RUNNER_SECRET"
"""Environment variable that hands the secret to a rank; under torchrun the user may set it, alike on each machine."""

_DIGITS = 2 * hashlib.sha256().digest_size
_secret = b""


def use_secret(secret: str) -> None:
    """Sign and verify with a secret from now on; with an empty one anybody can sign."""
    global _secret
    _secret = secret.encode()


def signed(name: str, text: str) -> str:
    """Return a text with the signature by which `verified` knows it.

    Args:
        name: the key under which it is stored: it is valid there alone.
        text: what is stored.
    """
    return hmac.digest(_secret, f"{name}\n{text}".encode(), "sha256").hex() + text


def verified(name: str, stored: bytes) -> str:
    """Return the text that a process of this launch has stored.

    Args:
        name: the key under which it was found.
        stored: what was found there.

    Raises:
        PermissionError: it is not what `signed` returns.
    """
    text = stored[_DIGITS:].decode(errors="replace")
    if not hmac.compare_digest(signed(name, text).encode(), stored):
        raise PermissionError(
            f"{name} in the store of the ranks was written by a process that is none of this launch, and is refused: "
            "find out who has access to this machine"
        )
    return text
