"""How a job of a sweep shares its beginning with jobs that train the same up to some batch."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.checkpoints.digest import FILE as DIGESTS
from runner.checkpoints.snapshot import capture
from runner.checkpoints.writing import write_checkpoint
from runner.config import build
from runner.destination import LoggerDestination, Record
from runner.distributed.environment import is_rank_zero
from runner.files.whole import link_or_copy, write_whole
from runner.hooks import Callback
from runner.runs.forks import FOLDER
from runner.sweeps.sharing.nodes import KEPT, ORIGIN
from runner.time import Timestamp

if TYPE_CHECKING:
    from runner.distributed.job import Job
    from runner.logger import Logger
    from runner.state import State

log = logging.getLogger("runner")

HISTORY = f"{FOLDER}/history.jsonl"
"""In the folder of a job that saves nodes: what it has logged so far."""


def watchers_of(job: Job) -> dict[str, Callback]:
    """Return the callbacks of a job that shares its beginning with others, by key; none of one that does not."""
    if job.shares is None:
        return {}
    watchers: dict[str, Callback] = {"shared_nodes": SharedNodes(job.shares), "shared_past": SharedPast()}
    if job.shares:
        section = {"_target_": "runner.callbacks.JSONLinesLogger", "filename": HISTORY}
        watchers["shared_history"] = build.make("callbacks.shared_history", section)
    return watchers


class SharedNodes(Callback):
    """Saves the state at the nodes from which other jobs begin, and takes over the digests of the run that saved one.

    Args:
        nodes: the nodes to save, as `runner.sweeps.sharing.tree.Node` describes them, each with the `path` to write.
    """

    def __init__(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        self.nodes = {int(one["batch"]): one for one in nodes}

    def after_load(self, state: State, logger: Logger) -> None:
        digests = _origin_of(state).get("digests")
        if digests is not None and is_rank_zero():
            state.run_dir.mkdir(parents=True, exist_ok=True)
            write_whole(state.run_dir / DIGESTS, digests)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        node = self.nodes.get(now.batch)
        if node is None:
            return
        found = now.epoch, now.batch_in_epoch, state.train_dataloader_len, str(state.max_duration)
        planned = node["epoch"], node["batch_in_epoch"], node["length"]
        if found[:3] != planned or found[3] not in node["lengths"].values():
            log.warning("batch %d: not where the sweep expected it, so no other job starts here", now.batch)
            return
        snapshot = capture(state, sharded=False)
        if snapshot is not None:  # rank 0
            logger.flush()
            path = Path(node["path"])
            shutil.rmtree(path.parent, ignore_errors=True)
            origin = {"run": str(state.run_dir.absolute()), "history": _read(state.run_dir / HISTORY)}
            _keep_checkpoints(state.run_dir, path.parent / KEPT)
            try:
                write_checkpoint({**snapshot, ORIGIN: {**origin, "digests": _read(state.run_dir / DIGESTS)}}, path)
            except OSError as error:
                log.warning("batch %d: was not saved for other jobs, which train alone: %s", now.batch, error)


class SharedPast(LoggerDestination):
    """Forwards what was logged before the run began to all destinations, once they are ready: it comes last."""

    def fit_start(self, state: State, logger: Logger) -> None:
        lines = [json.loads(line) for line in (_origin_of(state).get("history") or "").splitlines()]
        if not lines:
            return
        records = [*_records(lines)]
        for one in logger.destinations:
            getattr(one, "log_past", lambda records: None)(records)
            for line in lines:
                if "table" in line:
                    one.log_table(line["columns"], line["rows"], line["table"], line["step"])


def _origin_of(state: State) -> dict[str, Any]:
    """Return what the run that saved a node recorded about itself; empty if this run does not begin from a node."""
    path = None if state.resumed_from is None else state.resumed_from / ORIGIN
    return json.loads(path.read_text()) if path is not None and path.is_file() else {}


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _keep_checkpoints(run_dir: Path, kept: Path) -> None:
    """Link the checkpoints that a run has now, because one may be the best of a run that continues from here."""
    for folder in {one.parent.parent for one in run_dir.glob("[!.]*/[!.]*/manifest.json")}:
        if folder.name != FOLDER:
            hidden = shutil.ignore_patterns(".*")
            shutil.copytree(folder, kept / folder.name, symlinks=True, ignore=hidden, copy_function=link_or_copy)


def _records(lines: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    for line in lines:
        if "metrics" in line:
            now = Timestamp(batch=line["step"], epoch=line["epoch"], sample=line["sample"], token=line["token"])
            values = {key: float(value) for key, value in line["metrics"].items()}
            yield Record(values, line["step"], now, line["wall_time"])
