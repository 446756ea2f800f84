"""Train runs composed from conf/ for the benchmarks, in several processes, and keep each result as a line of a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"


@dataclass(frozen=True)
class Run:
    """A run to train: a command line without its seed, and the seed."""

    arguments: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        error: error of the final evaluation, of which lower is better: the share of images that are classified
            wrongly, or bits per byte.
        seconds: CPU time of training, and of preparing the weights that are evaluated. It does not include the start
            (imports, data, the model) or evaluations.
    """

    error: float
    seconds: float


def compose(arguments: Iterable[str]) -> dict[str, Any]:
    """Return the resolved config of a command line, without callbacks and without evaluations during training."""
    import hydra
    from omegaconf import OmegaConf

    from runner.cli.command_line import merge_repeated
    from runner.config.composing import initialized

    overrides = merge_repeated([*arguments, "callbacks=none", "trainer.eval_interval=0", "trainer.device=cpu"])
    with initialized(CONF):
        config: Any = OmegaConf.to_container(hydra.compose("config", overrides), resolve=True, throw_on_missing=True)
    config.pop("experiment", None)
    return config


def train(run: Run) -> Result:
    """Train a run in this process, and evaluate it once at the end."""
    from runner import evaluation_weights
    from runner.config import build
    from runner.config.experiment import Experiment

    experiment = Experiment(compose([*run.arguments, f"seed={run.seed}"]))
    build.check(experiment)
    with tempfile.TemporaryDirectory() as folder, build.build(experiment, Path(folder), "run") as trainer:
        start_time = time.process_time()
        trainer.fit()
        with evaluation_weights(trainer.state):  # estimates batch norm for averaged weights, and keeps it
            seconds = time.process_time() - start_time
        values = trainer.eval()["eval"]
    if "MulticlassAccuracy" in values:
        return Result(1 - float(values["MulticlassAccuracy"]), seconds)
    return Result(float(values["BitsPerByte"]), seconds)


def results(runs: Iterable[Run], jobs: int, path: Path | None = None) -> dict[Run, Result]:
    """Return the result of each run, trained in processes of one thread each.

    Args:
        runs: the runs to train, in this order.
        jobs: number of processes at a time.
        path: a file of JSON lines. Runs that are in it are not trained again, and new results are added to it. It
            identifies runs only by their arguments, so delete it after changing the code.
    """
    runs = list(dict.fromkeys(runs))
    results_by_run = _read(path) if path else {}
    missing = [run for run in runs if run not in results_by_run]
    if missing:
        os.environ.update(dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS"], "1"))  # read when the processes start
        start_time = time.monotonic()
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_start_process)
        try:
            futures = {pool.submit(train, run): run for run in missing}
            for count, future in enumerate(as_completed(futures), start=1):
                run = futures[future]
                results_by_run[run] = _result_of(future, run)
                if path:
                    _append(path, run, results_by_run[run])
                remaining = (time.monotonic() - start_time) / count * (len(missing) - count)
                _show(f"{count} of {len(missing)} runs, {remaining / 60:.0f} min left")
        finally:
            pool.shutdown(cancel_futures=True)
        _show("")
    return {run: results_by_run[run] for run in runs}


def seeds_from(first: int, count: int) -> range:
    """Return `count` seeds, beginning with `first`."""
    return range(first, first + count)


def _start_process() -> None:
    """Train two batches, so that the one-time work of a process does not count in the time of its first run."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path.insert(0, str(ROOT))  # before this folder, whose algorithms.py would hide the package
    torch.set_num_threads(1)
    train(Run(("experiment=digits_plain", "trainer.max_duration=2ba"), 0))


def _end_with_parent() -> None:
    """End this process when its parent ends for any reason, because its results are not needed any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _result_of(future: Any, run: Run) -> Result:
    try:
        return future.result()
    except Exception as error:
        error.add_note(f"python -m runner {' '.join(run.arguments)} seed={run.seed}")
        raise


def _read(path: Path) -> dict[Run, Result]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Run(tuple(line["arguments"]), line["seed"]): Result(line["error"], line["seconds"]) for line in lines}


def _append(path: Path, run: Run, result: Result) -> None:
    line: Mapping[str, Any] = {**asdict(run), **asdict(result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)
