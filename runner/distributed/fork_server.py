"""The process from which data workers are forked: it has imported torch, has one thread, and reads no data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker

from runner.distributed.environment import environment

METHOD = "forkserver"
"""The start method of data workers."""
_PRELOAD = ["runner.distributed.server_signals", "torch", "numpy", "runner.data.worker_process", "runner.data.loaders"]
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def start_fork_server(targets: Iterable[str] = ()) -> None:
    """Start the server, unless it is running, without waiting for it.

    Its imports take about as long as those of this process, so start it before importing torch. It ends after this
    process and all workers. A worker gets this process's environment and path when it starts.

    Args:
        targets: the dotted names of the functions and classes that make the data. If one of our packages among them has
            a module `preloaded`, the server imports it, because each worker would need seconds for that.
    """
    packages = {"runner.data.images" if name.startswith("torchvision.") else name.rsplit(".", 2)[0] for name in targets}
    preloaded = [f"{package}.preloaded" for package in sorted(packages) if package.startswith("runner.data.")]
    forkserver.set_forkserver_preload([*_PRELOAD, *preloaded])  # skips modules that do not exist
    quiet = "ignore:resource_tracker:UserWarning"  # the tracker warns when it cleans up after killed processes
    with environment({"PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quiet)))}):
        resource_tracker.ensure_running()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # With a safe path the working directory does not come first: a user's file there may be called runner.py.
    with environment({"PYTHONSAFEPATH": "1", "PYTHONPATH": path, **dict.fromkeys(_ONE_THREAD, "1")}):
        forkserver.ensure_running()
