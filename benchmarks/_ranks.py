"""Start ranks for a benchmark: processes that form a gloo group and run a function together."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import sharded_runs as runs  # pyright: ignore[reportMissingImports]

Results = dict[str, Any]


def start(function: Callable[[], Results], ranks: int, folder: Path) -> Results:
    """Run a function on new ranks, in a folder, and return the results of rank 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn(_rank, (function, ranks, port, str(folder)), nprocs=ranks)
    return torch.load(folder / "results.pt", weights_only=True)


def _rank(rank: int, function: Callable[[], Results], ranks: int, port: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.chdir(folder)
    with runs.on_ranks():
        results = function()
        if rank == 0:
            torch.save(results, "results.pt")
