"""Finds secrets in uncommitted changes, to leave them out of records and uploads."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePosixPath

NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "id_rsa*", "id_dsa*", "id_ecdsa*"),
    *("id_ed25519*", "credentials", "credentials.*", "*credentials.json", "secrets.*", "*.secret", "*.token"),
    *("service[-_]account*.json", "kubeconfig", "token.json"),
)
"""Names, in lower case, of files that usually hold secrets."""

# Private keys, and tokens that can be recognized by their prefix.
_CONTENT = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{36}|\bgithub_pat_\w{22}"
    rb"|\bhf_[A-Za-z0-9]{30}|\bsk-[\w-]{32}|\bxox[abprs]-[\w-]{10}|\bAIza[\w-]{35}|\bglpat-[\w-]{20}"
)
_FILE = re.compile(rb"^diff --git .*\n", re.MULTILINE)
_PATH = re.compile(rb'^(?:\+\+\+|---|rename (?:from|to)|copy (?:from|to)) "?(?:[ab]/)?(.*?)"?\t?$', re.MULTILINE)


def is_secret(path: str, content: bytes = b"") -> bool:
    """Return whether a file is likely to hold secrets, judged by its name and content."""
    name = PurePosixPath(path).name.lower()
    return any(fnmatchcase(name, pattern) for pattern in NAMES) or _CONTENT.search(content) is not None


def without_secrets(patch: bytes) -> tuple[bytes, list[str]]:
    """Return a git patch without files that are likely to hold secrets, and the names of those files."""
    starts = [match.start() for match in _FILE.finditer(patch)]
    kept = [patch[: starts[0]] if starts else patch]
    left_out = []
    for start, end in pairwise([*starts, len(patch)]):
        part = patch[start:end]
        head = part.partition(b"\n@@")[0]
        paths = [path.decode(errors="replace") for path in _PATH.findall(head) if path != b"/dev/null"]
        # For an empty or binary file, only the first line contains the name, twice.
        paths = paths or [head.partition(b"\n")[0].decode(errors="replace").rpartition(" b/")[2].rstrip('"')]
        if any(is_secret(path) for path in paths) or is_secret("", part):
            left_out.append(paths[-1])
        else:
            kept.append(part)
    return b"".join(kept), left_out
