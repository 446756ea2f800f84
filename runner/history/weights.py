"""Prepares the experiment of a command that uses saved weights and trains nothing, such as eval or predict."""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path

from runner.cli.command import Command
from runner.cli.command_line import key_of
from runner.cli.nearest import Advice
from runner.config import build
from runner.config.experiment import Experiment
from runner.failures.errors import WrongKey
from runner.history.saved_run import SavedRun
from runner.records.folder import MANIFEST
from runner.records.record import Record
from runner.terminal.console import show_path

log = logging.getLogger("runner")

ONLY_IN_TRAINING = re.compile(
    r"(optimizer|scheduler|trainer\.(max_duration|eval_interval|train_subset_num_batches|iteration_length|grad_accum"
    r"|scale_schedule_ratio|scale_warmup|step_schedulers_every_batch|session))(\.|$)"
)
"""The keys that change nothing unless a run trains."""
BASELINE = "runner.baseline"
"""Tag of a run that uses an untrained model, with its initial weights."""


def with_saved_weights(
    command: Command, experiment: Experiment, run: str | None, saved: SavedRun | None
) -> tuple[Experiment, dict[str, str]]:
    """Return the experiment of a run that uses saved weights, and tags that name their source.

    The weights are those with which the saved run was evaluated: their average, if an algorithm averages weights. The
    saved run is neither resumed nor changed. Without a saved run, a model chosen on the command line keeps its initial
    weights, and serves as a baseline.
    """
    if command.options.get("format") == "parquet" and find_spec("pyarrow") is None:
        raise ImportError("--format parquet: needs the package pyarrow; install it, or give --format pt")
    keys = [key_of(override) for override in command.overrides]
    unused = [*filter(ONLY_IN_TRAINING.match, keys)]
    if unused:
        log.warning("%s: changes nothing, because %s does not train", ", ".join(unused), command.verb)
    load_path = experiment.trainer.get("load_path")
    training_only = build.classes_with("only_in_training", experiment.callbacks)
    if run is None and load_path is None:
        if any(key.split(".")[0] in ("model", "experiment") for key in keys):
            return experiment.without_callbacks(training_only), {BASELINE: "true"}
        advice = Advice(
            f"{command.verb}: needs saved weights; write runner {command.verb} RUN, with a run's folder, one of its "
            "checkpoints or its MLflow id, or give trainer.load_path=<checkpoint> and the model whose weights it has; "
            "with model=... alone, the untrained model is used"
        )
        raise ValueError(advice.with_facts(key="RUN"))
    if run is not None and "trainer.load_path" in keys:
        raise WrongKey("trainer.load_path", "RUN already gives the weights; leave one of the two out", repr(load_path))
    key = "trainer.load_path" if run is None else "RUN"
    path = run or load_path
    if experiment.test == "best" and run is not None and command.verb == "eval":
        path = _best_of(path)
    checkpoint = str(build.checkpoint_of(key, path))
    is_by_id = saved is not None and not Path(saved.typed).exists()
    tags = {"runner.evaluates": saved.typed if saved is not None and is_by_id else checkpoint}
    return experiment.without_callbacks(training_only).with_trainer(load_path=checkpoint), tags


def _best_of(path: str) -> str:
    """Return the best checkpoint in a run's folder; return a path that is not a run's folder unchanged."""
    if not Record(Path(path)).exists:
        return path
    manifests = sorted(Path(path).glob(f"*/best/{MANIFEST}"))
    if not manifests:
        raise ValueError(
            f"test='best': {show_path(Path(path))} has no best checkpoint; use test=last for its newest one"
        )
    return str(manifests[0].parent)
