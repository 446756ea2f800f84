"""`runner predict RUN`: writes the predictions of a run's weights to a file, and trains nothing.

Each sample is predicted once, in order, on any number of ranks. `--data FILE_OR_FOLDER` reads new rows without labels
instead of the run's own data: prepared as in an evaluation, and each with its id or file name. Texts and images need
none of the run's own data.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import build
from runner.config.classes import needs_data, without_data
from runner.config.errors import config_errors
from runner.failures.errors import WrongConfig, WrongKey
from runner.records.job import Job
from runner.records.recording import recording, timing
from runner.terminal.answer import set_fields
from runner.terminal.console import show_path
from runner.verbs.eval import print_results, trainer_with_weights

if TYPE_CHECKING:
    from runner.training.trainer import Trainer


def run(job: Job) -> None:
    """Write the predictions of a run's weights to a file. All ranks."""
    # Imports torch.
    from runner.records.predictions import write_predictions
    from runner.trials.diagnosis import refusing_first_batch

    form = job.command.options["format"]
    new = job.command.options["data"]
    with recording(job) as result, ExitStack() as stack:
        if new:
            trainer, loader = _with_new_rows(job, new, stack)
            loaders = {"new": loader}
        else:
            trainer = stack.enter_context(trainer_with_weights(job))
            loaders = _own_loaders(job, trainer)
        stack.enter_context(refusing_first_batch())
        stack.enter_context(timing(result, trainer.error_context))
        written = []
        files = []
        for label, loader in loaders.items():
            stem = "predictions" if len(loaders) == 1 else f"predictions-{label}"
            path = trainer.state.run_dir / f"{stem}.{form}"
            ids = loader.dataset.ids if new else None
            with config_errors() if new else nullcontext():  # an image may be unreadable
                samples, order = write_predictions(trainer, loader, path, ids)
            trainer.logger.log_artifact(path, "predictions")
            files.append({"split": label, "path": str(path), "samples": samples})
            written.append((label, f"{samples:,} samples in {order}: {show_path(path)}"))
    set_fields(result={"folder": job.run_dir, "files": files})
    print_results(job, trainer, written)


def _own_loaders(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Return the loaders of the run's own data, by label."""
    split = job.command.options["split"]
    state = trainer.state
    evaluators = [part for part in state.evaluators if part.is_test == (split == "test")]
    loaders = {evaluator.label: evaluator.dataloader for evaluator in evaluators}
    if split == "train":
        loaders = {"train": state.train_dataloader}
    if not loaders:
        held = {"train": True, "eval": split == "test" and state.evaluators, "test": split == "eval"}
        available = " or ".join(name for name, is_held in held.items() if is_held)
        with config_errors():
            raise WrongKey("--split", f"this run has no such data; give {available}", repr(split))
    return loaders


def _with_new_rows(job: Job, new: str, stack: ExitStack) -> tuple[Trainer, Any]:
    """Return the Trainer and a loader of new rows. The run's own data is read only if they need it."""
    from runner.checkpoints.files import read_config
    from runner.data.new_rows import existing, read_new_rows

    experiment = job.experiment
    load_path = experiment.trainer.get("load_path")
    recorded = read_config(load_path) if load_path is not None and Path(load_path).is_dir() else None
    with config_errors():
        if (split := job.command.options["split"]) != "eval":
            raise WrongKey("--split", "new rows have no splits; leave out --split or --data", repr(split))
        path = existing(new)
        is_known = recorded is not None or not needs_data(experiment)
        loader = build.make_new_rows(experiment, path) if is_known else None
    if loader is not None:
        job = replace(job, experiment=without_data(experiment, recorded))
        return stack.enter_context(trainer_with_weights(job, loader)), loader
    try:
        trainer = stack.enter_context(trainer_with_weights(job))
    except WrongConfig as error:
        reason = "only this has the types of the columns" if is_known else "the weights do not say how many classes"
        message = f"{error}; --data={new!r} also needs the run's own data, because {reason}"
        raise WrongConfig(message, at=error.at, allowed=error.allowed, fix=error.fix) from error
    with config_errors():
        return trainer, read_new_rows(next(iter(_own_loaders(job, trainer).values())), path)
