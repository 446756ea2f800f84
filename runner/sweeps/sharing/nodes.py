"""`share=true`: the jobs of a sweep train what they have in common once.

The tree says where jobs part. Whichever job comes first to such a node trains through it and saves a checkpoint there;
all others begin from that. So the jobs may start in any order, in any process. A job that needs a node which another
one is training waits for it, and trains it itself if that job fails.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.checkpoints.history import last_saved
from runner.config import build
from runner.distributed.job import Job
from runner.failures.facts import WrongKey
from runner.files.lock import lock_file
from runner.files.whole import link_or_copy, read_object, write_whole
from runner.modes.table import Mode
from runner.runs.folder import MANIFEST
from runner.runs.forks import FOLDER, FORKED_AT, PARENT, planted
from runner.runs.recording import identify
from runner.sweeps.names import describe, swept_values
from runner.sweeps.plan import PlannedJob, is_grid
from runner.terminal.answer import give
from runner.terminal.text import Column, draw_table

SHARED = ".shared"
"""The folder of a sweep that holds its tree, and the checkpoints of nodes that jobs still need."""
TREE = "tree.json"
KEPT = "kept"  # beside the checkpoint of a node: the checkpoints that the run had there
ORIGIN = "shared.json"
"""In the checkpoint of a node: the run that saved it, what it had logged, and its digests."""
PAUSE = 0.2  # seconds between two checks of a node that another job trains


def check_share(config: DictConfig, mode: Mode) -> None:
    """Check that the jobs of a sweep can share what they have in common.

    Raises:
        WrongKey: nothing is trained, not all jobs are known in advance, or one of them depends on others.
    """
    if not (mode.trains or mode.name == "explain"):
        raise WrongKey("share", f"is for training; mode={mode.name} trains nothing", "true")
    if not is_grid(config):
        raise WrongKey("share", "is for a grid, whose jobs are known in advance; leave the sweeper out", "true")
    for key in ("resume", "rerun"):
        if config[key] is not None:
            raise WrongKey("share", f"is for jobs that start from scratch; leave {key}= out", "true")
    for key in build.callbacks_with({"callbacks": config.callbacks}, "only_in_sweeps"):
        reason = f"callbacks.{key} compares jobs at their beginning, which is then trained once; use one of the two"
        raise WrongKey("share", reason, "true")


def plan_sharing(jobs: Sequence[PlannedJob], is_here: bool) -> dict[str, Any]:
    """Return the tree of a sweep's jobs in plain containers.

    `is_here` tells whether they train in this process, which may import torch then.
    """
    if is_here:
        return _plan(jobs)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_plan, jobs).result()


def _plan(jobs: Sequence[PlannedJob]) -> dict[str, Any]:
    from runner.sweeps.sharing.tree import plan_tree

    return plan_tree(jobs).as_json()


def offer(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write the tree of a sweep where its jobs look for it; an empty tree disables sharing."""
    if tree:
        (folder / SHARED).mkdir(parents=True, exist_ok=True)
        write_whole(folder / SHARED / TREE, json.dumps(tree, indent=1))
    else:
        (folder / SHARED / TREE).unlink(missing_ok=True)


def remove_nodes(folder: Path) -> None:
    """Remove what the jobs of a sweep shared, after the last one has ended."""
    shutil.rmtree(folder / SHARED, ignore_errors=True)


def show_tree(tree: Mapping[str, Any], fixed: Sequence[str], form: str | None) -> None:
    """Print what the jobs of a sweep share.

    `form` is 'table' or 'json'; None prints one line.
    """
    give(result=tree)
    if form == "json":
        print(json.dumps(tree, indent=1))
        return
    trained = tree["batches"]
    alone = tree["batches_alone"]
    saved = f", {1 - trained / alone:.0%} less" if trained < alone else ": they share nothing"
    print(f"share: {len(tree['jobs'])} jobs train {trained:,} batches instead of {alone:,}{saved}", flush=True)
    if form is None:
        return
    rows = [*_rows(tree["jobs"], None, 0)]
    names = [branch + describe(swept_values(one["overrides"], fixed)) for branch, one in rows]
    batches = ["unknown" if one["end"] is None else f"{one['start'] + 1}-{one['end']}" for _, one in rows]
    columns = [
        Column(["job"], names),
        Column(["batches"], batches),
        Column(["apart by"], [one["why"] for _, one in rows]),
    ]
    print("\n".join(draw_table(columns)))


def _rows(jobs: Sequence[Mapping[str, Any]], parent: int | None, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield jobs, each below the one from which it branches off, with the prefix of its name."""
    for one in sorted((one for one in jobs if one["parent"] == parent), key=lambda one: one["start"]):
        yield f"{'  ' * (depth - 1)}└ " if depth else "", one
        yield from _rows(jobs, one["job"], depth + 1)


@contextmanager
def sharing(sweep_folder: Path, job: Job, is_stopped: Callable[[], bool]) -> Iterator[Job]:
    """Yield a job of a sweep as it is to train: from the last node that others have trained, if the sweep shares.

    Within the context this process alone trains the nodes that it is to save. When a job has ended well, it no longer
    needs the checkpoint that it began with, and lets go of it. Rank 0. Once the sweep is stopped, nothing is waited
    for.
    """
    shared = sweep_folder / SHARED
    identity = identify(job.config)
    nodes = [one for one in read_object(shared / TREE).get("nodes", ()) if identity in one["lengths"]]
    if not nodes:
        yield job
        return
    with ExitStack() as claims:
        begun = last_saved(Path(job.run_dir)) if job.config["resume"] is not None else None
        if begun is None:
            (shared / f"begun-{identity}").unlink(missing_ok=True)  # an earlier attempt may have left nothing behind
            start, due = _wait_for_nodes(nodes, shared, identity, claims, is_stopped)
        else:
            later = [one for one in nodes if one["batch"] > begun]
            start = None
            due = [one for one in later if not _is_ready(shared, one) and _claim(shared, one, claims)]
        if start is not None:
            job = _begun_at(job, _place(shared, start), int(start["batch"]))
        (shared / f"begun-{identity}").touch()
        saved = [{**one, "path": str(_place(shared, one))} for one in due if _is_needed(shared, one, identity)]
        for one in nodes:
            if not _is_needed(shared, one):
                shutil.rmtree(_place(shared, one).parent, ignore_errors=True)
        yield replace(job, shares=saved)
        shutil.rmtree(Path(job.run_dir) / FOLDER, ignore_errors=True)  # it has succeeded, with its own checkpoints


Node = dict[str, Any]


def _wait_for_nodes(
    nodes: Sequence[Node], shared: Path, identity: str, claims: ExitStack, is_stopped: Callable[[], bool]
) -> tuple[Node | None, list[Node]]:
    """Return the last node from which a job can begin, and those after it, which this process alone is to train.

    Raises:
        SystemExit: the sweep was stopped.
    """
    start: Node | None = None
    told = False
    for place, one in enumerate(nodes):
        while not _is_ready(shared, one) and not _claim(shared, one, claims):
            if is_stopped():
                raise SystemExit(128 + signal.SIGTERM)
            if not told:
                print(f"waits for another job, which trains the first {one['batch']} batches of this one", flush=True)
                told = True
            time.sleep(PAUSE)
        if not _is_ready(shared, one):  # checked again, now that no other job can be about to save it
            return start, [one, *(later for later in nodes[place + 1 :] if _claim(shared, later, claims))]
        start = one
    return start, []


def _place(shared: Path, node: Node) -> Path:
    """Return the folder of a node's checkpoint."""
    return shared / f"ba{node['batch']}-{node['head']}" / f"ba{node['batch']}"


def _is_ready(shared: Path, node: Node) -> bool:
    return (_place(shared, node) / MANIFEST).is_file()


def _claim(shared: Path, node: Node, claims: ExitStack) -> bool:
    """Return whether no other job is training a node, or will while the claim is held."""
    lock = lock_file(shared / f"ba{node['batch']}-{node['head']}.lock")
    if lock is not None:
        claims.enter_context(lock)
    return lock is not None


def _is_needed(shared: Path, node: Node, by_others_than: str = "") -> bool:
    """Return whether a job that passes through a node has not started yet."""
    return any(not (shared / f"begun-{one}").exists() for one in node["lengths"] if one != by_others_than)


def _begun_at(job: Job, checkpoint: Path, batch: int) -> Job:
    """Return a job that begins from a node, copying the node's files to its folder (sharing disk blocks)."""
    origin = read_object(checkpoint / ORIGIN)
    tags = {**job.tags, PARENT: str(origin.get("run", "")), FORKED_AT: str(batch)}
    fork = replace(job, config={**job.config, "at": batch, "resume": str(checkpoint)}, tags=tags)
    config = planted(fork)
    kept = checkpoint.parent / KEPT
    if kept.is_dir():
        shutil.copytree(kept, Path(job.run_dir), symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)
    print(f"starts after batch {batch}, up to which {Path(tags[PARENT]).name} trained the same", flush=True)
    return replace(fork, config={**config, "at": None})
