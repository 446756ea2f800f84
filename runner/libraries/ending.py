"""The end of the process, without the teardown of the interpreter."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from runner.libraries.shortcuts import is_taken


def end_process(code: int) -> NoReturn:
    """End the process with an exit code.

    Threads are joined, exit handlers run and output is flushed, as when Python exits. The teardown of the interpreter
    is skipped: with torch loaded it takes half a second, and threads of torch's process groups can abort the process.
    """
    if not is_taken("exit"):
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
