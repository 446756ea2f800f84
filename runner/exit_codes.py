"""Exit codes, each of which says what to do next; `docs/programs.md` lists them for users. Standard library only."""

from __future__ import annotations

import errno
from dataclasses import replace

from runner.failures import Facts, RankFailed, facts_of

DONE = 0
FAILED = 1
WRONG_CONFIG = 2
DIVERGED = 3
ENVIRONMENT = 75
"""The machine failed rather than the program, so a retry may succeed; `EX_TEMPFAIL` of sysexits.h."""
INTERRUPTED = 130
TERMINATED = 143

NAMES = {
    FAILED: "failed",
    WRONG_CONFIG: "wrong_config",
    DIVERGED: "diverged",
    ENVIRONMENT: "environment",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}
"""The `code` of an error in JSON, by exit code."""

_SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)


def is_of_environment(error: BaseException) -> bool:
    """Return whether the machine caused a failure: no space or memory was left, or a process was killed."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or facts_of(link).of_environment:
            return True
        if isinstance(link, RankFailed) and link.facts.of_environment:
            return True
        if isinstance(link, OSError) and link.errno in _SHORTAGES:
            return True
        link = link.__cause__ or link.__context__
    return False


def facts_to_report(error: BaseException) -> Facts:
    """Return the facts about a failure that another rank needs, with whether the machine caused it."""
    return replace(facts_of(error), of_environment=is_of_environment(error))


def code_of_failure(error: BaseException) -> int:
    """Return the exit code after a failure in training."""
    return ENVIRONMENT if is_of_environment(error) else FAILED
