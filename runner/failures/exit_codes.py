"""Exit codes, which tell a caller what to do next; `docs/programs.md` lists them. Standard library only."""

from __future__ import annotations

from runner.failures.facts import is_of_environment

DONE = 0
FAILED = 1
WRONG_CONFIG = 2
DIVERGED = 3
UNTESTABLE = 125
"""`verify` or `verdict` was refused, so there is no answer: `git bisect run` skips the commit."""
ENVIRONMENT_FAILED = 75
"""The machine failed rather than the program, so a retry may succeed; `EX_TEMPFAIL` of sysexits.h."""
INTERRUPTED = 130
TERMINATED = 143

NAMES = {
    FAILED: "failed",
    WRONG_CONFIG: "wrong_config",
    UNTESTABLE: "wrong_config",
    DIVERGED: "diverged",
    ENVIRONMENT_FAILED: "environment",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}
"""The `code` of an error in JSON, by exit code."""


def code_of_failure(error: BaseException) -> int:
    """Return the exit code after a failure in training."""
    return ENVIRONMENT_FAILED if is_of_environment(error) else FAILED
