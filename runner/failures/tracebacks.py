"""Shortens tracebacks: the user's own calls stay, and the library calls between them are only counted."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

VARIABLE = "HYDRA_FULL_ERROR"
"""The environment variable that requests full tracebacks."""

_CALL = re.compile(
    r"""^[ ]{2}File[ ]"(?P<file>.+)",[ ]line[ ]\d+,[ ]in[ ].*\n
    (?:[ ]{4}(?P<source>.*)\n(?:[ ]{4}.*\n)*)?
    (?:[ ]{2}\[Previous[ ]line[ ]repeated[ ].*\n)?""",
    re.MULTILINE | re.VERBOSE,
)
_are_whole = False


@contextmanager
def raised_by_hydra() -> Iterator[None]:
    """Let Hydra raise its errors within the `with` block, so that they can be shown as one message.

    Users set the same variable to get full tracebacks, so whether they did is recorded first.
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

    The traceback of a data worker, which torch puts into the message, is shortened too. If no call is the user's own,
    an exception that this project raised itself is shown without calls, because its message explains it, and any other
    with all of them. All calls are also shown if the user asked for them.
    """
    text = "".join(traceback.format_exception(error))
    calls = [*_CALL.finditer(text)]
    if _are_whole or not calls:
        return text
    if any(is_of_user(call["file"]) for call in calls):
        return _shortened(text, calls)
    last = calls[-1]
    if Path(last["file"]).is_relative_to(_libraries()[0]) and (last["source"] or "").startswith("raise "):
        return f"[{_count(calls)}; {VARIABLE}=1 shows them]\n{text[last.end() :]}"
    return text


def _shortened(text: str, calls: Iterable[re.Match[str]]) -> str:
    """Return a text in which each series of consecutive library calls is replaced by their number."""
    series: list[list[re.Match[str]]] = []
    for call in calls:
        is_next = series and series[-1][-1].end() == call.start()
        if is_next and not is_of_user(call["file"]) and not is_of_user(series[-1][-1]["file"]):
            series[-1].append(call)
        else:
            series.append([call])
    hint = f"; {VARIABLE}=1 shows them"
    shortened = ""
    end = 0
    for group in series:
        shortened += text[end : group[0].start()]
        end = group[-1].end()
        if len(group) == 1:
            shortened += group[0][0]
        else:
            shortened += f"  [{_count(group)}{hint}]\n"
            hint = ""
    return shortened + text[end:]


def _count(calls: Sequence[re.Match[str]]) -> str:
    packages = dict.fromkeys(_package(call["file"]) for call in calls)
    if len(packages) > 1:
        packages.pop("contextlib", None)  # it only enters and exits the contexts of the others
    return f"{len(calls)} calls in {', '.join(packages)}"


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
