"""Turns exits that this program did not raise into failures of the code that raised them."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.failures.errors import UnexpectedExit

_OURS = Path(__file__).absolute().parents[1]  # not resolved: modules are imported through links


@contextmanager
def exits_as_failures() -> Iterator[None]:
    """Raise `UnexpectedExit` instead of an exit that comes from other code.

    Raises:
        UnexpectedExit: a `SystemExit`, a `GeneratorExit` or a `KeyboardInterrupt` was raised outside of this package.
    """
    try:
        yield
    except BaseException as error:
        failure = as_failure(error)
        if failure is error:
            raise
        raise failure from error


def is_expected_exit(error: BaseException | None) -> bool:
    """Return whether a run ended by an exit that this program raised: on a signal, or at the end of a session."""
    return isinstance(error, KeyboardInterrupt | SystemExit) and as_failure(error) is error


def as_failure(error: BaseException) -> BaseException:
    """Return an exception itself, but for an exit that other code raised, an `UnexpectedExit` that names the line.

    This program raises exits from its own files: in handlers of signals, and at the end of a session. An exit with
    another origin, such as `sys.exit(0)` in a data set, must not look like success.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, Exception) or not frames or Path(frames[-1].filename).is_relative_to(_OURS):
        return error
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return error  # Python's own handler raises it wherever the program is
    line = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"
    failure = UnexpectedExit(
        f"{type(error).__name__}({', '.join(map(repr, error.args))}) raised at {line}: would end the process without "
        "a failure. Raise another exception to fail; in a callback, state.stop_training() ends training"
    )
    failure.__cause__ = error
    return failure
