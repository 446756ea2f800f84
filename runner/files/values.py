"""Kinds of string arguments, declared in annotations: `mirror: Address | None = None`.

These declarations, not the names of keys, decide how other people's configs are checked, for arguments by name and by
position. A string without a declaration is only text, such as the name of a metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, get_args


class Kind(Enum):
    """The meaning of a string argument."""

    COMMAND = "command"
    CODE = "code, if it names an owner on the Hub"
    ADDRESS = "address"
    PATH = "path"
    INNER_PATH = "path inside a folder"
    HUB_NAME = "name on the Hub, or a folder"
    SECRET = "password or token"


Command = Annotated[str, Kind.COMMAND]
"""A command to run."""
Kernel = Annotated[str, Kind.CODE]
"""A way to compute. With an owner, as in `owner/kernel`, it is downloaded from the Hub and run."""
KernelOptions = Annotated[Mapping[str, Any], Kind.CODE]
"""Settings of another library, in which strings may name a `Kernel`."""
Address = Annotated[str, Kind.ADDRESS]
"""A destination or source of data: a URL, a server, or an account, team or registered model there."""
LocalPath = Annotated[str, Kind.PATH]
"""A file or folder to read or write, relative to the working directory."""
LocalPaths = LocalPath | Sequence[LocalPath]
"""Files or folders, or patterns of them."""
InnerPath = Annotated[str, Kind.INNER_PATH]
"""A file or folder inside another one, mostly the run's."""
HubName = Annotated[str, Kind.HUB_NAME]
"""A name on the Hub to download from, or a folder to read."""
Secret = Annotated[str, Kind.SECRET]
"""A password or a token; it is hidden in records, logs and messages, and typed again to resume a run."""


def kinds_in(hint: Any) -> Iterator[Kind]:
    """Yield the kinds that an annotation declares for strings."""
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Kind))
    for part in get_args(hint):
        yield from kinds_in(part)
