"""The end of the process, without the teardown of the interpreter."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from runner.libraries.shortcuts import is_taken


def end_process(code: int, begin_again: Callable[[], object] | None = None) -> NoReturn:
    """End the process with an exit code, or at its end replace it by `begin_again`.

    Threads are joined, exit handlers run and output is flushed, as when Python exits. The teardown of the interpreter
    is skipped: with torch loaded it takes half a second, and threads of torch's process groups can abort the process.
    """
    if begin_again is None and not is_taken("exit"):  # there is no public way to run exit handlers before the end
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if begin_again is not None:
        begin_again()
    os._exit(code)
