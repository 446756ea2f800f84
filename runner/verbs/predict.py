"""`runner predict RUN`: writes the predictions of a run's weights to a file, and trains nothing.

Each sample is predicted once, in order, on any number of ranks. `--data FILE_OR_FOLDER` reads new rows without labels
instead of the run's own data: prepared as in an evaluation, and each with its id or file name.
"""

from __future__ import annotations

from contextlib import nullcontext

from runner.config.errors import config_errors
from runner.failures.errors import WrongKey
from runner.records.job import Job
from runner.records.recording import recording, timing
from runner.terminal.answer import set_fields
from runner.terminal.console import show_path
from runner.verbs.eval import print_results, trainer_with_weights


def run(job: Job) -> None:
    """Write the predictions of a run's weights to a file. All ranks."""
    from runner.data.new_rows import read_new_rows
    from runner.records.predictions import write_predictions

    form = job.command.options["format"]
    split = job.command.options["split"]
    with recording(job) as result, trainer_with_weights(job) as trainer, timing(result, trainer.error_context):
        state = trainer.state
        evaluators = [part for part in state.evaluators if part.is_test == (split == "test")]
        loaders = {evaluator.label: evaluator.dataloader for evaluator in evaluators}
        new = job.command.options["data"]
        if new and split != "eval":
            with config_errors():
                raise WrongKey("--split", "new rows have no splits; leave it or --data out", repr(split))
        if split == "train":
            loaders = {"train": state.train_dataloader}
        if not loaders:
            held = {"train": True, "eval": split == "test" and state.evaluators, "test": split == "eval"}
            available = " or ".join(name for name, is_held in held.items() if is_held)
            with config_errors():
                raise WrongKey("--split", f"this run has no such data; give {available}", repr(split))
        ids = None
        if new:
            with config_errors():
                loader, ids = read_new_rows(next(iter(loaders.values())), new)
            loaders = {"new": loader}
        written = []
        files = []
        for label, loader in loaders.items():
            stem = "predictions" if len(loaders) == 1 else f"predictions-{label}"
            path = state.run_dir / f"{stem}.{form}"
            with config_errors() if new else nullcontext():  # an image may be unreadable
                samples, order = write_predictions(trainer, loader, path, ids)
            trainer.logger.log_artifact(path, "predictions")
            files.append({"split": label, "path": str(path), "samples": samples})
            written.append((label, f"{samples:,} samples in {order}: {show_path(path)}"))
    set_fields(result={"folder": job.run_dir, "files": files})
    print_results(job, trainer, written)
