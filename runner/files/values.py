"""What the text of an argument stands for, declared in its annotation: `mirror: Address | None = None`.

A config that someone else wrote is checked by these declarations, however its keys are spelled, and whether an argument
is given by name or by position. Text without a declaration is only text, such as the name of a metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, get_args


class Kind(Enum):
    """What a text stands for."""

    COMMAND = "command"
    CODE = "code, if it names an owner on the Hub"
    ADDRESS = "address"
    PATH = "path"
    INNER_PATH = "path inside a folder"
    HUB_NAME = "name on the Hub, or a folder"
    SECRET = "password or token"


Command = Annotated[str, Kind.COMMAND]
"""Run as a command."""
Kernel = Annotated[str, Kind.CODE]
"""A way to compute. With an owner, as in `owner/kernel`, it is downloaded from the Hub and run."""
KernelOptions = Annotated[Mapping[str, Any], Kind.CODE]
"""Settings of another library, whose texts may name a `Kernel`."""
Address = Annotated[str, Kind.ADDRESS]
"""Where data is sent or fetched: a URL, a server, or an account, team or registered model there."""
LocalPath = Annotated[str, Kind.PATH]
"""A file or folder that is read or written; relative to the working directory."""
LocalPaths = LocalPath | Sequence[LocalPath]
"""Files or folders, or patterns of them."""
InnerPath = Annotated[str, Kind.INNER_PATH]
"""A file or folder inside another one, mostly the run's."""
HubName = Annotated[str, Kind.HUB_NAME]
"""What is downloaded from the Hub, or read from a folder."""
Secret = Annotated[str, Kind.SECRET]
"""A password or a token: it is hidden in records, logs and messages, and typed again when a run is resumed."""


def kinds_in(hint: Any) -> Iterator[Kind]:
    """Yield what a text stands for as an argument with an annotation."""
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Kind))
    for part in get_args(hint):
        yield from kinds_in(part)
