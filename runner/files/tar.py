"""Reads tar files by other people, and refuses headers that would take much time or memory."""

from __future__ import annotations

import tarfile
from typing import Any

LARGEST = 16_000  # bytes of an extended header, such as a long name; Python takes quadratic time to search it
_EXTENDED = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class PlainTarInfo(tarfile.TarInfo):
    """A header that is checked before its content is read; for `tarfile.open(tarinfo=PlainTarInfo)`."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> PlainTarInfo:
        """Return a header.

        Raises:
            tarfile.ReadError: the extended header that follows is large, or the member is sparse.
        """
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED and not 0 <= header.size <= LARGEST:
            raise tarfile.ReadError(f"a header has {header.size:,} bytes, at most {LARGEST:,} are read")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"member {header.name!r} is sparse")
        return header
