"""`mode=eval` and `mode=predict`: use the weights of a run that was trained before, and train nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import build
from runner.config.errors import config_errors
from runner.distributed.job import Job
from runner.failures.facts import WrongKey
from runner.history.saved_run import SavedRun
from runner.records.folder import MANIFEST
from runner.records.record import log_record
from runner.records.recording import check_objective, recording, timing
from runner.records.result import Objective
from runner.terminal.answer import give
from runner.terminal.console import print_block, show_path
from runner.training.final_test import check_test_data

if TYPE_CHECKING:
    from runner.core.state import State
    from runner.training.evaluator import Evaluator
    from runner.training.trainer import Trainer


def with_saved_weights(config: dict[str, Any], saved: SavedRun | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of a run that uses saved weights, and tags that say where the weights are from.

    They are the weights that evaluations of the other run used: if an algorithm averages weights, the average. The
    other run is neither resumed nor changed.
    """
    mode = config["mode"]
    trainer = config["trainer"]
    if config["rerun"] is not None:
        raise ValueError(f"rerun={config['rerun']!r}: rerun trains; for mode={mode} give resume=<the run> instead")
    if config["resume"] is None and trainer.get("load_path") is None:
        raise ValueError(
            f"mode={mode}: needs saved weights; give resume=<run folder, one of its checkpoints, or MLflow id>, or "
            "trainer.load_path=<checkpoint> together with the model whose weights it has"
        )
    if mode == "predict" and config["predict"]["format"] == "parquet" and find_spec("pyarrow") is None:
        raise ImportError("predict.format='parquet' needs the package pyarrow; install it, or give predict.format=pt")
    key = "trainer.load_path" if config["resume"] is None else "resume"
    path = config["resume"] or trainer["load_path"]
    if config["test"] == "best" and config["resume"] is not None and mode == "eval":
        path = _best_of(path)
    checkpoint = str(build.checkpoint_of(key, path))
    by_id = saved is not None and not Path(saved.given).exists()
    tags = {"runner.evaluates": saved.given if saved is not None and by_id else checkpoint}
    return {**config, "resume": None, "trainer": {**trainer, "load_path": checkpoint}}, tags


def _best_of(path: str) -> str:
    """Return the best checkpoint of a run, given its folder; a path inside of that folder is returned as it is."""
    if not (Path(path) / "config.yaml").is_file():
        return path
    found = sorted(Path(path).glob(f"*/best/{MANIFEST}"))
    if not found:
        raise ValueError(
            f"test='best': {show_path(Path(path))} has no best checkpoint; use test=last for its newest one"
        )
    return str(found[0].parent)


def evaluate(job: Job) -> Objective:
    """Run the evaluators on the weights of a run, print the metrics, and return the objective. All ranks.

    Test data is evaluated only if the key `test` asks for it.
    """
    with recording(job) as result:
        with _trainer(job) as trainer:
            with config_errors():
                check_objective(trainer.state, job.config["objective"])
                evaluators = _to_evaluate(trainer.state, job.config["test"])
            trainer.noting = partial(timing, result, trainer.noting)
            values = trainer.eval(evaluators)
        result.measure(trainer.state, job.config["objective"])
    rows = [(f"{label}/{name}", value) for label, metrics in values.items() for name, value in metrics.items()]
    _print(trainer, rows)
    return result.answer


def _to_evaluate(state: State, test: str | None) -> list[Evaluator] | None:
    """Return the evaluators to run; None if there are none at all."""
    if test is not None:
        check_test_data(state, test)
        return [*state.evaluators]
    found = [one for one in state.evaluators if not one.is_test]
    if state.evaluators and not found:
        raise ValueError("test=None: this run has test data only; give test=last to evaluate it")
    return found or None


def predict(job: Job) -> None:
    """Write the predictions of a run's weights to a file: each sample once, in order. All ranks."""
    from runner.modes.predictions import write_predictions

    wanted = job.config["predict"]
    with recording(job) as result, _trainer(job) as trainer, timing(result, trainer.noting):
        state = trainer.state
        split = wanted["split"]
        loaders = {one.label: one.dataloader for one in state.evaluators if one.is_test == (split == "test")}
        if split == "train":
            loaders = {"train": state.train_dataloader}
        if not loaders:
            held = {"train": True, "eval": split == "test" and state.evaluators, "test": split == "eval"}
            others = " or ".join(name for name, there in held.items() if there)
            with config_errors():
                raise WrongKey("predict.split", f"this run has no such data; give {others}", repr(split))
        written = []
        files = []
        for label, loader in loaders.items():
            stem = "predictions" if len(loaders) == 1 else f"predictions-{label}"
            path = state.run_dir / f"{stem}.{wanted['format']}"
            samples, order = write_predictions(trainer, loader, path)
            trainer.logger.log_artifact(path, "predictions")
            files.append({"split": label, "path": str(path), "samples": samples})
            written.append((label, f"{samples:,} samples in {order}: {show_path(path)}"))
    give(result={"folder": job.run_dir, "files": files})
    _print(trainer, written)


@contextmanager
def _trainer(job: Job) -> Iterator[Trainer]:
    """Yield the Trainer of a job, with its clock at the time when the weights were saved; record the run."""
    from runner.checkpoints.snapshot import read_timestamp
    from runner.trials.diagnosis import noting_faults

    with config_errors():
        trainer = build.build(job.config, Path(job.run_dir), job.run_name)
    with trainer:
        # Metrics are then logged at the batch at which the other run logged its own.
        if (path := Path(job.config["trainer"]["load_path"])).is_dir():
            trainer.state.timestamp = trainer.state.previous_timestamp = read_timestamp(path)
        with config_errors():
            log_record(trainer.logger, job)
        trainer.noting = partial(noting_faults, job.config, job.choices)
        yield trainer


def _print(trainer: Trainer, rows: Sequence[tuple[str, Any]]) -> None:
    """Print results, then the folder of the run and the commands that show it. All ranks; rank 0 prints."""
    from runner.distributed.ranks import get_global_rank
    from runner.training.metrics import scalars

    if get_global_rank() != 0:
        return
    state = trainer.state
    load_path = Path(state.config["trainer"]["load_path"])
    when = f", after {state.timestamp.batch} batches" if load_path.is_dir() else ""
    lines = [("weights", f"{show_path(load_path)}{when}")]
    for label, value in rows:
        if isinstance(value, str):
            lines.append((label, value))
        else:
            lines += [(key, f"{float(number):.6g}") for key, number in scalars(label, value).items()]
    lines.append(("run", show_path(state.run_dir)))
    commands = (getattr(one, "ui_command", None) for one in trainer.logger.destinations)
    lines += [("compare", command) for command in commands if command]
    print_block("", lines)
