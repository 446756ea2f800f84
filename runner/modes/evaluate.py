"""mode=eval and mode=predict: use the weights of a run that was trained before, and train nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import build
from runner.config.errors import config_errors
from runner.distributed.job import Job
from runner.runs.folder import MANIFEST
from runner.runs.record import log_record
from runner.runs.result import check_objective, recording
from runner.runs.saved_run import SavedRun
from runner.terminal import print_block, show_path

if TYPE_CHECKING:
    from runner.trainer import Trainer


def with_saved_weights(config: dict[str, Any], saved: SavedRun | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of a run that evaluates or predicts, and the tags that say what.

    It takes the weights that evaluations of the other run measured (under an averaging algorithm, the average), and
    neither goes on with that run nor changes it.

    Raises:
        ValueError: no weights are named, they cannot be used, or the predictions cannot be written as asked.
    """
    mode, trainer = config["mode"], config["trainer"]
    if config["rerun"] is not None:
        raise ValueError(f"rerun={config['rerun']!r}: rerun trains; for mode={mode} give resume=<the run> in its place")
    if config["resume"] is None and trainer.get("load_path") is None:
        raise ValueError(
            f"mode={mode}: with which weights? Give resume=<run folder, one of its checkpoints, or MLflow id>, or "
            "trainer.load_path=<checkpoint> together with the model that it is of"
        )
    if mode == "predict" and config["predict"]["format"] == "parquet" and find_spec("pyarrow") is None:
        raise ImportError("predict.format='parquet' needs the package pyarrow; install it, or give predict.format=pt")
    key = "trainer.load_path" if config["resume"] is None else "resume"
    checkpoint = str(build.checkpoint_of(key, config["resume"] or trainer["load_path"]))
    by_id = saved is not None and not Path(saved.given).exists()
    tags = {"runner.evaluates": saved.given if saved is not None and by_id else checkpoint}
    return {**config, "resume": None, "trainer": {**trainer, "load_path": checkpoint}}, tags


def evaluate(job: Job) -> float | None:
    """Run all evaluators on a run's weights, print what they find, and return what a sweep compares. All ranks."""
    with recording(job) as result:
        with _trainer(job) as trainer:
            with config_errors():
                check_objective(trainer.state, job.config["objective"])
            values = trainer.eval()
        result.measure(trainer.state, job.config["objective"])
    names = {(label, name): value for label, found in values.items() for name, value in found.items()}
    # By the keys under which training logs them.
    _print(trainer, [(f"loss/{a}/total" if b == "loss" else f"metrics/{a}/{b}", v) for (a, b), v in names.items()])
    return result.objective


def predict(job: Job) -> None:
    """Write down what a run's weights predict for each sample, once and in order. All ranks."""
    from runner.modes.predictions import write_predictions

    wanted = job.config["predict"]
    with recording(job), _trainer(job) as trainer, trainer.noting():
        state = trainer.state
        loaders = {one.label: one.dataloader for one in state.evaluators}
        if wanted["split"] == "train":
            loaders = {"train": state.train_dataloader}
        written = []
        for label, loader in loaders.items():
            stem = "predictions" if len(loaders) == 1 else f"predictions-{label}"
            path = state.run_dir / f"{stem}.{wanted['format']}"
            samples, order = write_predictions(trainer, loader, path)
            trainer.logger.log_artifact(path, "predictions")
            written.append((label, f"{samples:,} samples in {order}: {show_path(path)}"))
    _print(trainer, written)


@contextmanager
def _trainer(job: Job) -> Iterator[Trainer]:
    """The Trainer of a job, at the time at which the weights were saved; recorded, and closed at the end."""
    from runner.modes.diagnosis import noting_faults
    from runner.time import Timestamp

    with config_errors():
        trainer = build.build(job.config, Path(job.run_dir), job.run_name)
    with trainer:
        saved = json.loads((Path(job.config["trainer"]["load_path"]) / MANIFEST).read_text())
        # So values are logged at the batch at which the other run logged its own.
        trainer.state.timestamp = trainer.state.previous_timestamp = Timestamp.from_state_dict(saved["timestamp"])
        with config_errors():
            log_record(trainer.logger, job)
        trainer.noting = partial(noting_faults, job.config)
        yield trainer


def _print(trainer: Trainer, rows: Sequence[tuple[str, Any]]) -> None:
    """Print results, then where the run lies and how to look at it; on rank 0."""
    from runner.distributed.collectives import get_global_rank
    from runner.metrics import scalars

    if get_global_rank() != 0:
        return
    state = trainer.state
    load_path = Path(state.config["trainer"]["load_path"])
    lines = [("weights", f"{show_path(load_path)}, after {state.timestamp.batch} batches")]
    for label, value in rows:
        one = {label: value} if isinstance(value, str) else scalars(label, value)
        lines += [(key, part if isinstance(part, str) else f"{float(part):.6g}") for key, part in one.items()]
    lines.append(("run", show_path(state.run_dir)))
    commands = (getattr(one, "ui_command", None) for one in trainer.logger.destinations)
    lines += [("compare", command) for command in commands if command]
    print_block("", lines)
