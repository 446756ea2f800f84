"""The JSON object that a command with `--json` prints, documented in `docs/programs.md`."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

from runner.distributed import restarts
from runner.distributed.endings import at_abrupt_end
from runner.distributed.environment import is_rank_zero
from runner.failures.exit_codes import FAILED, INTERRUPTED, NAMES, TERMINATED
from runner.files.addresses import without_credentials

JSON = "--json"
"""The option, which every verb has."""
SCHEMA = 1
"""The version of the format. It grows when a field is removed or changes its meaning, not when a field is added."""
MAX_TEXT = 1_000_000  # characters of printed text to keep for the answer
_REASONS = {INTERRUPTED: "Ctrl-C ended the command", TERMINATED: "SIGTERM ended the command"}

_fields: dict[str, Any] = {}


def set_fields(**fields: Any) -> None:
    """Set fields of the command's JSON object, such as `result`. They have no effect without `--json`."""
    _fields.update(fields)


def error_object(code: int, message: str, key: str = "", allowed: Sequence[str] = (), fix: str = "") -> dict[str, Any]:
    """Return an error as a JSON object.

    `fix` is the argument to type instead of the wrong one. `key`, `allowed` and `fix` are empty if they are unknown.
    """
    return {
        "code": NAMES.get(code, NAMES[FAILED]),
        "key": key or None,
        "message": without_credentials(message),
        "allowed": [*allowed] or None,
        "fix": fix if fix and without_credentials(fix) == fix else None,
    }


def run_with_answer(run: Callable[[Sequence[str]], int]) -> int:
    """Run a command with its arguments, and return its exit code. With `--json`, print one JSON object at the end.

    Until then, everything that this process and its children write to stdout goes to stderr. `run` gets the arguments
    without `--json`, which affects only the output. Rank 0 prints.
    """
    _fields.clear()
    typed = sys.argv[1:]
    arguments = [argument for argument in typed if argument != JSON]
    if arguments == typed:
        return run(arguments)
    sys.stdout.flush()
    output: Any = _Output()
    stdout = os.dup(1)
    os.dup2(2, 1)  # for child processes, and for code outside Python

    def end(code: int, reason: str) -> None:
        if is_rank_zero():
            set_fields(reason=reason)
            os.write(stdout, f"{_as_text(typed, code, '')}\n".encode())

    at_abrupt_end.append(end)
    restarts.before_restart.append(lambda: os.dup2(stdout, 1))
    try:
        with redirect_stdout(output):
            try:
                code = run(arguments)
            except KeyboardInterrupt:  # Ctrl-C while the runner was still being imported
                code = INTERRUPTED
    finally:
        at_abrupt_end.remove(end)
        if not restarts.is_requested():
            restarts.before_restart.clear()
            os.dup2(stdout, 1)
            os.close(stdout)
    if restarts.is_requested():
        return code  # the next attempt prints the answer
    if is_rank_zero():
        print(_as_text(typed, code, "".join(output.texts)), flush=True)
    atexit.register(os.dup2, 2, 1)  # at exit, functions that were registered earlier run after this one, and may print
    return code


def _as_text(typed: Sequence[str], code: int, text: str) -> str:
    error = _fields.get("error")
    if error is None and code:
        error = error_object(code, _fields.get("reason") or _REASONS.get(code, f"exit code {code}; see stderr"))
    result = _fields.get("result")
    if result is None and not code and text:
        result = {"text": text}
    content = {
        "schema": SCHEMA,
        "verb": _fields.get("verb"),
        "command": [without_credentials(argument) for argument in typed],
        "exit_code": code,
        "result": result,
        "error": error,
    }
    return json.dumps(plain(content), allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value as JSON can represent it: NaN, infinities and unsupported types become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class _Output:
    """Forwards text to stderr, and keeps a copy for verbs that have no other result."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._room = MAX_TEXT

    def write(self, text: str) -> int:
        if self._room > 0:
            self.texts.append(text[: self._room])
            self._room -= len(text)
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)
