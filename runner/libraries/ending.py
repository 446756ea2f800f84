"""The end of the process, without the teardown of the interpreter."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from runner.libraries.shortcuts import is_enabled


def end_process(code: int, begin_again: Callable[[], object] | None = None) -> NoReturn:
    """End the process with an exit code, or finally replace it by calling `begin_again`.

    Like Python's own exit, it joins threads, runs exit handlers and flushes output. It skips the teardown of the
    interpreter: with torch loaded this takes half a second, and threads of process groups can abort the process.
    """
    if begin_again is None and not is_enabled("exit"):  # there is no public way to run exit handlers early
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if begin_again is not None:
        begin_again()
    os._exit(code)
