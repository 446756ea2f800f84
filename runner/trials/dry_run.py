"""A dry run: the real Trainer, engine, algorithms and callbacks, with one batch of each data set. Nothing is kept.

The model is made on the meta device first, to take no memory. If its weights are small, it is made again on the CPU and
a few samples go through it, which also finds labels out of range and failing metrics. If they are large, the batch
stays on the meta device, and only shapes and types are checked.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import load_weights, restore
from runner.config import build
from runner.config.classes import with_classes, without_data
from runner.config.experiment import Experiment
from runner.core.destination import LoggerDestination
from runner.core.hooks import Callback
from runner.core.state import State
from runner.data.content import describe_samples
from runner.distributed.collectives import pick_device
from runner.distributed.ranks import get_world_size
from runner.distributed.sharding import refuse_generation
from runner.distributed.shares import refuse_unsharded
from runner.failures.facts import annotate
from runner.records.recording import check_unfinished
from runner.records.result import objectives_of
from runner.timing.event import Event
from runner.training.evaluator import ensure_evaluators
from runner.training.final_test import check_test
from runner.training.trainer import Trainer
from runner.trials.diagnosis import NO_CHOICES, Choices, hook_at_fault, naming_fault
from runner.trials.lint import find_mistakes
from runner.trials.one_batch import OneBatch, TrialData
from runner.trials.sizes import Sizes, at_peak, describe_groups, measure, size_of

MAX_WEIGHTS = 128 * 2**20
"""Bytes of the largest model to try on the CPU; with gradients and moments it takes four times as much memory."""


@dataclass
class Findings:
    """The findings of a dry run.

    Attributes:
        model: the class of the model, and that of the module in it.
        sizes: memory and sizes of checkpoints.
        groups: a line for each parameter group of the optimizers.
        data: samples and batches of each data set.
        sample: a training sample as text, with what is trained in double brackets; empty if the data has none.
        batch: types and shapes of the batch that went through the run.
        device: 'cpu', or 'meta' if the model is too large to be tried with values.
        events: the number of events that fired.
        destinations: keys of callbacks that would write, print or connect; they are made but not called.
        refused: keys of callbacks and algorithms that read values, which tensors on the meta device do not have.
        unpredicted: why the peak memory of training cannot be predicted; empty if it can.
        warnings: a sentence for each probable mistake that does not prevent training.
    """

    model: str = ""
    sizes: Sizes = field(default_factory=Sizes)
    groups: list[str] = field(default_factory=list)
    data: str = ""
    sample: str = ""
    batch: str = ""
    device: str = ""
    events: int = 0
    destinations: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unpredicted: str = ""
    warnings: list[str] = field(default_factory=list)


class EventRecorder(Callback):
    """Records which events fire, and ends training after its first epoch."""

    def __init__(self) -> None:
        self.seen: set[Event] = set()

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        self.seen.add(event)
        if event is Event.EPOCH_END:
            state.stop_training()


def try_out(experiment: Experiment, choices: Choices = NO_CHOICES, resume: str | None = None) -> Findings:
    """Send one batch through all events of a run, and return the findings. Without other ranks.

    `resume` is the checkpoint that the run would continue from; on the meta device it is not read.
    Destinations are made but not called: they would write, print or connect.
    """
    findings = Findings()
    with collecting_warnings(findings.warnings), naming_fault(experiment, choices):
        build.make_parts(experiment, uploads=False)  # so that errors of constructors come before any data is read
        experiment, data = _make_data(experiment, findings)
        model = make_model_on_meta(experiment)
        weights = [] if model is None else [weight for weight in model.parameters() if not is_lazy(weight)]
        if size_of(weights) > MAX_WEIGHTS:
            findings.device = "meta"
            if resume is not None:  # it is not read there, and LoadCheckpoint would look for its own
                left_out = build.classes_with("only_in_training", experiment.callbacks)
                experiment = experiment.without_callbacks(left_out)
            while (hook := _find_refused_on_meta(experiment, data, findings)) is not None:
                findings.refused.append(hook)
        else:
            findings.device = "cpu"
            _try_with_and_without_algorithms(experiment, data, findings, resume)
    _predict_peak(experiment, data, findings)
    return findings


def _predict_peak(experiment: Experiment, data: TrialData, findings: Findings) -> None:
    """Add to the findings the peak memory of training with the batches of a rank, or why it cannot be predicted."""
    from runner.trials.peak_memory import predict_peak  # which imports much of torch

    shards, split = layout_of(experiment)
    ranks = max(experiment.launch.processes(), get_world_size())
    samples = None if data.order is None else -(-data.order.batch_size // (ranks // split))
    readers: list[str] = []
    while True:
        parts = _make_parts(experiment, findings) | {"callbacks": {}, "schedulers": None}
        parts["algorithms"] = {key: algorithm for key, algorithm in parts["algorithms"].items() if key not in readers}
        try:
            with collecting_warnings([]):
                model = make_model_on_meta(experiment)
                model = build.make_model(experiment) if model is None else model
                batch = data.train.take(samples)
                loader = partial(data.train.yielding, samples=samples)
                peak = predict_peak(experiment, model, batch, loader, parts, ranks)
        except Exception as error:  # training itself works, as tried before
            hook = hook_at_fault(error, experiment)
            if hook is None or hook.key in readers:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                findings.unpredicted = f"the memory of activations: {reason}"
                return
            readers.append(hook.key)
        else:
            break
    findings.sizes = at_peak(findings.sizes, peak, ranks > shards == split == 1)
    if readers:
        findings.unpredicted = (
            f"the memory of {', '.join(readers)}: they read values, and tensors without memory have none"
        )


@contextmanager
def make_idle_trainer(experiment: Experiment, logs: bool) -> Iterator[Trainer]:
    """Yield the Trainer of an experiment without its data, callbacks and algorithms, in a temporary folder."""
    experiment = without_data(experiment)
    model = make_model_on_meta(experiment)
    changed = {"device": "cpu" if model is None else "meta", "precision": "fp32", "compile": False, "load_path": None}
    with (
        tempfile.TemporaryDirectory(prefix="runner-check-") as folder,
        build.assemble(
            experiment.with_trainer(**changed),
            Path(folder, "run"),
            "check",
            model=build.make_model(experiment) if model is None else model,
            loggers=[LoggerDestination()] if logs else [],
        ) as trainer,
    ):
        yield trainer


def _try_with_and_without_algorithms(
    experiment: Experiment, data: TrialData, findings: Findings, resume: str | None
) -> None:
    """Try the batch; if it fails without algorithms too, raise that simpler error."""
    try:
        _try_batch(experiment, data, findings, resume)
    except Exception as error:
        if experiment.algorithms:
            _try_batch(experiment.changed(algorithms={}), data, Findings(device=findings.device), resume)
            annotate(error, works_without="algorithms")
            error.add_note("it works without algorithms")
        raise


def make_model_on_meta(experiment: Experiment) -> Any:
    """Return the model on the meta device, without memory for its weights; None if it cannot be made there."""
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            return build.make_model(experiment)
    return None


def _find_refused_on_meta(experiment: Experiment, data: TrialData, findings: Findings) -> str | None:
    """Try the batch on the meta device; return the key of a callback or algorithm that fails to read values."""
    try:
        _try_batch(experiment, data, findings)
    except RuntimeError as error:
        hook = hook_at_fault(error, experiment)
        if hook is None or "meta" not in str(error):
            raise
        return hook.key
    return None


def _try_batch(experiment: Experiment, data: TrialData, findings: Findings, resume: str | None = None) -> None:
    """Send one batch through a run on the device in `findings`, and add to them."""
    section = experiment.trainer
    on_meta = findings.device == "meta"
    device = pick_device(section.get("device", "auto"))
    changed = {"device": findings.device, "compile": False, "iteration_length": None}
    if device.type != findings.device and section.get("precision") != "bf16":
        changed["precision"] = "fp32"  # only bf16 changes the weights; autocast does not
    if on_meta:
        changed["load_path"] = None
    parts = _make_parts(experiment, findings)
    parts["callbacks"]["check"] = recorder = EventRecorder()
    model = make_model_on_meta(experiment) if on_meta else build.make_model(experiment)
    loaders: list[Any] = [data.train, *(evaluator.dataloader for evaluator in data.evaluators)]
    for loader in loaders:
        loader.read_for(model)
    with tempfile.TemporaryDirectory(prefix="runner-check-") as folder:
        trainer = build.assemble(
            experiment.with_trainer(**changed),
            Path(folder, "run"),
            "check",
            model=model,
            train_dataloader=data.train,
            eval_dataloader=data.evaluators or None,
            loggers=[] if on_meta else [LoggerDestination()],  # values are logged and then dropped
            resume_path=None if on_meta else resume,
            **parts,
        )
        with trainer:
            check_test(trainer.state, experiment.test, objectives_of(experiment.objective))
            check_unfinished(trainer.state)
            trainer.fit()
            if data.evaluators:
                trainer.eval()
            if not on_meta:  # predictions on the meta device cannot be copied to the CPU
                trainer.predict(data.evaluators[0].dataloader if data.evaluators else data.train)
            findings.model = _name_of(trainer.state)
            findings.batch = data.train.describe()
            if max(layout := layout_of(experiment)) > 1:
                refuse_generation(trainer.state.unwrapped_model)
            findings.sizes = measure(trainer.state, *layout)
            findings.groups = describe_groups(trainer.state.optimizers)
            findings.events = len(recorder.seen)
            findings.warnings += _find_untrained(trainer.state)
            findings.warnings += find_mistakes(experiment, trainer.state.progress, data.order, device.type)
            _load_what_was_saved(trainer.state, on_meta)


def _load_what_was_saved(state: State, only_weights: bool) -> None:
    """Load the checkpoint that a saver has written, if any, as a resumed run would."""
    try:
        checkpoint = find_checkpoint(state.run_dir)
    except FileNotFoundError:
        return
    try:
        if only_weights or not (checkpoint / "state.pt").exists():
            load_weights(state, checkpoint)
        else:
            restore(state, checkpoint)
    except Exception as error:
        error.add_note("while loading the checkpoint that this trial has saved")
        raise


def _make_parts(experiment: Experiment, findings: Findings) -> dict[str, Any]:
    """Return the objects of an experiment, except its destinations and those refused before."""
    parts = build.make_parts(experiment, uploads=False)
    findings.destinations = [key for key, part in parts["callbacks"].items() if isinstance(part, LoggerDestination)]
    for group in ("callbacks", "algorithms"):
        left_out = (*findings.destinations, *findings.refused)
        parts[group] = {key: part for key, part in parts[group].items() if key not in left_out}
    if "scheduler" in findings.refused:
        parts["schedulers"] = None
    return parts


def layout_of(experiment: Experiment) -> tuple[int, int]:
    """Return over how many ranks the weights are sharded, and over how many each layer is split."""
    section = experiment.trainer
    ranks = max(experiment.launch.processes(), get_world_size())
    split = section.get("tensor_parallel", 1) if ranks > 1 else 1
    return (section.get("shard_size") or ranks // split) if section.get("parallel") == "fsdp" else 1, split


def _make_data(experiment: Experiment, findings: Findings) -> tuple[Experiment, TrialData]:
    """Return the experiment, its model's config filled in from the data, and stand-ins for the data."""
    section = experiment.data
    target = section.target
    fake = hasattr(section.find_target(), "fake")
    replaced = experiment.changed(data={**section.plain, "_target_": f"{target}.fake"}) if fake else experiment
    train, evaluation = build.make_data(replaced)
    experiment = with_classes(experiment, train)
    evaluators = ensure_evaluators(evaluation)
    group = layout_of(experiment)[1]
    loaders = [("train", train), *((evaluator.label, evaluator.dataloader) for evaluator in evaluators)]
    for label, loader in () if fake else loaders:  # made-up batches say nothing about real ones
        refuse_unsharded(loader, label, experiment.launch.processes() // group, group)
    findings.data = "; ".join(f"{label} {_describe(loader)}" for label, loader in loaders)
    findings.data += f"; {'made up, not read' if fake else f'one batch read: {target} has no `fake`'}"
    findings.sample = getattr(train, "sample", "")
    for evaluator in evaluators:
        evaluator.dataloader = OneBatch(evaluator.dataloader, evaluator.label)
    return experiment, TrialData(getattr(train, "order", None), OneBatch(train, "train"), evaluators)


def _name_of(state: State) -> str:
    model = state.unwrapped_model
    inner = getattr(model, "module", None)
    return type(model).__name__ + (f"({type(inner).__name__})" if inner is not None else "")


def _find_untrained(state: State) -> Iterator[str]:
    parameters = state.unwrapped_model.named_parameters()
    idle = [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]
    if idle:
        more = f" and {len(idle) - 3} more" * (len(idle) > 3)
        yield f"no gradient reaches {', '.join(idle[:3])}{more}: not trained, and refused by DDP"


def _describe(loader: Any) -> str:
    order = getattr(loader, "order", None)
    try:
        batches = f"{len(loader):,} batch{'es' * (len(loader) != 1)}"
    except TypeError:
        batches = "an unknown number of batches"
    if order is None:
        return batches
    return f"{describe_samples(loader)} in {batches} of {order.batch_size}"


@contextmanager
def collecting_warnings(messages: list[str]) -> Iterator[None]:
    """Collect each different warning within the context in `messages` instead of printing it."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("runner")
    propagate = log.propagate
    log.propagate = False
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
        messages += [str(warning.message).partition("\n")[0] for warning in caught]
        messages[:] = dict.fromkeys(messages)
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
