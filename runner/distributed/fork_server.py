"""The process from which data workers are forked: it has imported torch, runs one thread, and reads no data itself."""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver, resource_tracker

from runner.distributed.environment import environment

METHOD = "forkserver"
"""The start method of data workers."""
_PRELOAD = ["runner.distributed.server_signals", "torch", "numpy", "runner.data.worker_process", "runner.data.loaders"]
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def start_fork_server() -> None:
    """Start the server, unless it is running or has no place here, and do not wait for it.

    Its imports take about as long as those of this process, so start it before torch is imported. It ends when this
    process and all workers have ended. Workers get this process's environment and path when they are started.
    """
    forkserver.set_forkserver_preload(_PRELOAD)
    quiet = "ignore:resource_tracker:UserWarning"  # it cleans up after killed processes, and warns
    with environment({"PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quiet)))}):
        resource_tracker.ensure_running()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # Not the working directory first, where a user's file may be called runner.py.
    with environment({"PYTHONSAFEPATH": "1", "PYTHONPATH": path, **dict.fromkeys(_ONE_THREAD, "1")}):
        forkserver.ensure_running()
