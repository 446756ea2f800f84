"""Measure what successive halving saves on 27 settings, whether it finds the best one, and the time Optuna takes.

    python benchmarks/pruning.py

The settings are learning rates, weight decays and sizes of the hidden layer of the multi-layer perceptron on digits,
each trained for 27 epochs in the order of the grid, and judged by the loss. One sweep trains all of them, the other
uses `+callbacks=sweep_pruner`; training is counted in batches. If the winners differ, both are trained with eight
seeds, and `runner verdict` decides. Before that, it prints the time that Optuna takes per job: for a search by TPE,
with its study in memory as usual or in SQLite, and for the journal of the pruner.

The exit code is 1 if halving trained more than a third of the batches, its winner is worse, or bookkeeping took more
than 50 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna

from runner.callbacks._pruning_study import PruningStudy, make_pruner

LARGEST_SHARE = 1 / 3  # of the batches of the full sweep
BOOKKEEPING = 0.05  # seconds per job
JOBS = 60
EVALUATIONS = 9  # of a job
RUN = [sys.executable, "-m", "runner"]
PLAIN = [
    "model=mlp",
    "callbacks=[checkpoint_saver]",
    "callbacks.checkpoint_saver.save_interval=0",
    "objective=eval/loss",
]
GRID = {
    "optimizer.lr": ("0.01", "0.03", "0.1"),
    "optimizer.weight_decay": ("0.0001", "0.001", "0.01"),
    "model.module.hidden": ("[16]", "[64]", "[256]"),
}
PRUNER = ["+callbacks=sweep_pruner", "callbacks.sweep_pruner.pruner=successive_halving"]


def sweep(folder: Path, name: str, *arguments: str) -> float:
    """Run a sweep into a folder of its own, and return its seconds."""
    start_time = time.perf_counter()
    command = [*RUN, "-m", *PLAIN, *arguments, f"hydra.sweep.dir={name}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=3600)
    return time.perf_counter() - start_time


def jobs(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a sweep's jobs."""
    return [json.loads(path.read_text()) for path in folder.glob("[!.]*/result.json")]


def batches(folder: Path) -> int:
    """Return the number of batches that the jobs of a sweep have trained."""
    manifests = folder.glob("[!.]*/checkpoints/latest/manifest.json")
    return sum(json.loads(path.read_text())["timestamp"]["batch"] for path in manifests)


def winner(folder: Path) -> dict[str, str]:
    """Return the values of the best job among those that finished."""
    finished = [job for job in jobs(folder) if job["status"] == "FINISHED"]
    best = min(finished, key=lambda job: job["objective"])
    overrides = dict(override.split("=", 1) for override in best["overrides"])
    return {key: overrides[key] for key in GRID}


def decide(folder: Path, full: dict[str, str], pruned: dict[str, str], length: str) -> str:
    """Train both winners with eight seeds, and return the verdict on the one of the pruned sweep."""
    for name, values in (("a", full), ("b", pruned)):
        sweep(folder, name, *(f"{key}={value}" for key, value in values.items()), "sweep=seeds", length)
    command = [*RUN, "verdict", "a", "b", "--metric=eval/loss", "--json"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)  # exit code 1: worse
    return json.loads(result.stdout)["result"]["comparisons"][0]["verdict"]


def halving(folder: Path, length: str) -> bool:
    """Print what halving saves and which setting it finds; return whether both meet the limits."""
    grid = [f"{key}={','.join(values)}" for key, values in GRID.items()]
    trained = {}
    for name, pruner in (("full", []), ("pruned", PRUNER)):
        seconds = sweep(folder, name, *grid, length, *pruner)
        trained[name] = batches(folder / name)
        statuses = Counter(job["status"].lower() for job in jobs(folder / name))
        ends = ", ".join(f"{count} {status}" for status, count in statuses.items())
        print(f"{name} sweep: {trained[name]:,} batches in {seconds:.0f} s; {ends}")
    share = trained["pruned"] / trained["full"]
    print(f"halving trains {share:.1%} of the batches (limit {LARGEST_SHARE:.1%})")
    best, pruned = (winner(folder / name) for name in trained)
    verdict = "the same" if best == pruned else decide(folder, best, pruned, length)
    print(f"winner of the full sweep: {' '.join(best.values())}; of halving: {' '.join(pruned.values())}: {verdict}")
    return share <= LARGEST_SHARE and verdict != "worse"


def pace(work: Callable[[int], None]) -> float:
    """Return the median CPU seconds of a job, over the last quarter of `JOBS` jobs in a row."""
    seconds = []
    for number in range(JOBS):
        start_time = time.process_time()
        work(number)
        seconds.append(time.process_time() - start_time)
    return statistics.median(seconds[-JOBS // 4 :])


def bookkeeping(folder: Path) -> bool:
    """Print the time that Optuna takes per job; return whether it is within the limit, not counting the sampler."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def job(number: int) -> None:
        study = PruningStudy(folder, str(number), str(number), 0, make_pruner("successive_halving", {}), True)
        for step in range(1, EVALUATIONS + 1):
            study.should_prune(1.0 / step, step)
        study.finish(1.0)

    def search(storage: str | None, sampler: optuna.samplers.BaseSampler) -> Callable[[int], None]:
        study = optuna.create_study(storage=storage, sampler=sampler)

        def trial(number: int) -> None:
            pending = study.ask()
            rate = pending.suggest_float("optimizer.lr", 1e-3, 1.0, log=True)
            decay = pending.suggest_float("optimizer.weight_decay", 1e-5, 1e-2, log=True)
            study.tell(pending, rate + decay)

        return trial

    tpe = pace(search(None, optuna.samplers.TPESampler(seed=0)))
    memory, sqlite = (
        pace(search(storage, optuna.samplers.RandomSampler(seed=0))) for storage in (None, f"sqlite:///{folder / 'db'}")
    )
    pruner = pace(job)
    print(f"CPU time per job, of {JOBS}: TPE {tpe * 1000:.1f} ms, without the sampler {memory * 1000:.1f} ms,")
    print(f"  with the study in SQLite {sqlite * 1000:.1f} ms; the pruner {pruner * 1000:.1f} ms", end=" ")
    print(f"for {EVALUATIONS} evaluations (limit {BOOKKEEPING * 1000:.0f} ms)")
    return max(memory, sqlite) + pruner <= BOOKKEEPING


def main() -> int:
    """Print the figures; exit code 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=27, help="length of a job (default 27)")
    length = f"trainer.max_duration={parser.parse_args().epochs}ep"
    with tempfile.TemporaryDirectory() as name:
        is_cheap = bookkeeping(Path(name))
        return int(not halving(Path(name), length) or not is_cheap)


if __name__ == "__main__":
    sys.exit(main())
