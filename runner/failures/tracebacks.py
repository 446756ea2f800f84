"""Shortens tracebacks: the user's own calls stay, and library calls in between are only counted."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path

VARIABLE = "HYDRA_FULL_ERROR"
"""The environment variable that requests full tracebacks."""

_are_whole = False


@contextmanager
def raised_by_hydra() -> Iterator[None]:
    """Let Hydra raise its errors within the `with` block, so that they can be shown as one message.

    Users may set the same variable, so whether they did is recorded first.
    """
    global _are_whole
    _are_whole = VARIABLE in os.environ
    os.environ.setdefault(VARIABLE, "1")
    try:
        yield
    finally:
        if not _are_whole:
            del os.environ[VARIABLE]
        _are_whole = False


def are_whole() -> bool:
    """Return whether the user asked for full tracebacks."""
    return _are_whole


def environment_of_user() -> dict[str, str]:
    """Return the environment as the user has set it, to run the command line in another process."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE or _are_whole}


def is_of_user(file: str) -> bool:
    """Return whether a source file is neither this project's nor a library's."""
    path = Path(file)
    known = any(path.is_relative_to(folder) for folder in _libraries())
    return path.is_absolute() and not known and "site-packages" not in path.parts


@cache
def _libraries() -> tuple[Path, ...]:
    own = Path(__file__).absolute().parents[1]  # not resolved: modules are imported through links
    return own, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def format_failure(error: BaseException) -> str:
    """Return the traceback of an exception with only the user's own calls in full.

    All calls are shown if the user asked for them, or if none is the user's own.
    """
    formatted = traceback.TracebackException.from_exception(error)
    chain = list(_chain(formatted))
    if not _are_whole and any(is_of_user(frame.filename) for link in chain for frame in link.stack):
        for link in chain:
            link.stack = _shortened(link.stack)
    return "".join(formatted.format())


def _chain(formatted: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception with its causes and contexts."""
    yield formatted
    for linked in (formatted.__cause__, formatted.__context__):
        if linked is not None:
            yield from _chain(linked)


class _Shortened(traceback.StackSummary):
    """The calls of a traceback; a call without a file stands for several."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary) -> str:
        if frame_summary.filename:
            return super().format_frame_summary(frame_summary)
        return f"  [{frame_summary.name}]\n"


def _shortened(stack: traceback.StackSummary) -> traceback.StackSummary:
    frames: list[traceback.FrameSummary] = []
    for of_user, group in groupby(stack, lambda frame: is_of_user(frame.filename)):
        calls = list(group)
        if of_user or len(calls) == 1:
            frames += calls
        else:
            packages = dict.fromkeys(_package(call.filename) for call in calls)
            if len(packages) > 1:
                packages.pop("contextlib", None)  # it only enters and exits the others' contexts
            frames.append(traceback.FrameSummary("", 0, f"{len(calls)} calls in {', '.join(packages)}", line=""))
    if any(not frame.filename for frame in frames):
        first = next(frame for frame in frames if not frame.filename)
        first.name += f"; {VARIABLE}=1 shows them"
    return _Shortened(frames)


def _package(file: str) -> str:
    """Return the name of the package or standard library module that a source file belongs to."""
    path = Path(file)
    own, *libraries = _libraries()
    if path.is_relative_to(own):
        return own.name
    for library in reversed(libraries):  # innermost first: site-packages lies inside the standard library's folder
        if path.is_relative_to(library):
            return path.relative_to(library).parts[0].removesuffix(".py")
    return file.strip("<>")
