"""Ranks of a benchmark's own: processes that join over gloo, and run a function together."""

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

Found = dict[str, Any]


def start(function: Callable[[], Found], ranks: int, folder: Path) -> Found:
    """Run a function on ranks of their own, in a folder, and return what rank 0 found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, (function, ranks, port, str(folder)), nprocs=ranks)
    return torch.load(folder / "found.pt", weights_only=True)


def _rank(rank: int, function: Callable[[], Found], ranks: int, port: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.chdir(folder)
    with runs.on_ranks():
        found = function()
        if rank == 0:
            torch.save(found, "found.pt")
