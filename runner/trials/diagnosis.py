"""Diagnoses errors in a dry run or in training: finds the hook, or the model and data, that caused them."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from runner.cli.catalogue import CONF
from runner.cli.command_line import only_typed
from runner.config import build
from runner.config.errors import CONFIG_ERRORS, explain, line_of_user
from runner.config.experiment import Experiment
from runner.config.section import Section
from runner.core.state import State
from runner.failures.errors import RankFailed, WrongArgument, WrongConfig
from runner.failures.facts import annotate, argument_of, facts_of, is_of_environment
from runner.records.job import Job
from runner.timing.event import Event
from runner.trials.batch_text import describe_batch

Choices = Mapping[str, str]
"""`Job.choices`: the chosen name by config group."""
NO_CHOICES: Choices = MappingProxyType({})

OF_THE_ENVIRONMENT = (OSError, MemoryError, RankFailed)
"""Exceptions of a first batch that may not recur, unlike those of a batch that does not fit the model."""

_CLOCKS = {"eval": "eval_timestamp", "predict": "predict_timestamp"}
"""The attribute of the State that counts the batches of a verb that does not train."""

MAX_MESSAGE = 300  # characters shown of an error's own message

STEPS = {
    "forward": "its forward pass",
    "eval_forward": "its forward pass in evaluation",
    "training_step": "its training_step()",
    "loss": "its loss",
    "update_metric": "its metrics",
    "compute": "its metrics",
    "num_samples": "its num_samples()",
    "num_tokens": "its num_tokens()",
    "loss_weight": "its loss_weight()",
    "backward": "its backward pass",
}
"""The steps of a batch, by the function that the loops call."""
AFTER_FORWARD = ("loss", "update_metric", "compute", "backward")
"""The steps at which the outputs for the current batch exist."""
CALL = re.compile(rf"(?:(?<![\w.])|\._?)({'|'.join(STEPS)})\(")
"""A call of a step in a line of the loops."""
_LOOPS = re.compile(r"runner\.training\.\w+|runner\.models\.(loss|first_loss)")
"""The modules that call a model's methods during training and evaluation."""
DEVICE_ASSERT = "usually a label or token out of range, which a GPU does not name: runner check tries a few on the CPU"

_EVENTS = list(Event)  # in the order in which they fire
_OF_BATCH = _EVENTS[_EVENTS.index(Event.AFTER_DATALOADER) : _EVENTS.index(Event.AFTER_BACKWARD) + 1]
_WITH_OUTPUTS = _OF_BATCH[_OF_BATCH.index(Event.AFTER_FORWARD) :]


class HookAtFault(NamedTuple):
    """The callback or algorithm that raised an exception, by its group and key in the config."""

    group: str
    """'callbacks' or 'algorithms'; empty for an algorithm that is the scheduler."""
    key: str
    event: Event | None
    """The event that the hook was handling; None in `close`, or when a value was logged."""

    @property
    def path(self) -> str:
        """The path of the hook's section."""
        return f"{self.group}.{self.key}" if self.group else self.key


def hook_at_fault(error: BaseException, experiment: Experiment) -> HookAtFault | None:
    """Return the hook of the config that raised an exception, or None if no hook did."""
    for raiser in facts_of(error).raisers:
        for group, sections in (("callbacks", experiment.callbacks), ("algorithms", experiment.algorithms)):
            if raiser.config_key in sections:
                return HookAtFault(group, raiser.config_key, raiser.event)
        if raiser.config_key == "scheduler" and experiment.scheduler:
            return HookAtFault("", "scheduler", raiser.event)
    return None


@contextmanager
def naming_fault(experiment: Experiment, choices: Choices = NO_CHOICES) -> Iterator[None]:
    """Turn exceptions into a WrongConfig that names the cause and the user's line of code."""
    try:
        yield
    except WrongConfig:
        raise
    except Exception as error:
        raise _refused(_describe(error, experiment, choices), error) from error


@contextmanager
def noting_faults(experiment: Experiment, choices: Choices) -> Iterator[None]:
    """Add notes to exceptions: the section of the hook that raised them and, as in `noting_batch`, the batch."""
    with build.naming_hooks(experiment), noting_batch(experiment, choices):
        yield


@contextmanager
def noting_first_batch(job: Job, state: State) -> Iterator[None]:
    """Add the notes of `noting_faults`, and a refusal of the config if a new run, or a verb, fails in its first batch.

    The refusal is a fact of the exception, and so reaches all ranks.
    """
    try:
        with noting_faults(job.experiment, job.choices):
            yield
    except Exception as error:
        may_not_recur = isinstance(error, OF_THE_ENVIRONMENT) or is_of_environment(error)
        now = getattr(state, _CLOCKS.get(job.command.verb, "timestamp"))
        if now.batch == 0 and not may_not_recur and not facts_of(error).divergence:
            annotate(error, refusal=_describe(error, job.experiment, job.choices), section=_section(error))
        raise


@contextmanager
def refusing_first_batch() -> Iterator[None]:
    """Turn exceptions with a refusal by `noting_first_batch` into a WrongConfig. All ranks."""
    try:
        yield
    except Exception as error:
        if refusal := facts_of(error).refusal:
            raise _refused(refusal, error) from error
        raise


def _refused(text: str, error: Exception) -> WrongConfig:
    facts = facts_of(error)
    return WrongConfig(text, at=facts.key or _section(error), allowed=facts.allowed)


def _section(error: Exception) -> str:
    """Return the section at fault; if a model does not fit its data, the one of the two that was typed."""
    return facts_of(error).section or (only_typed(sys.argv[1:], "model", "data") if _step(error) is not None else "")


@contextmanager
def noting_batch(experiment: Experiment, choices: Choices = NO_CHOICES) -> Iterator[None]:
    """Add a note with the current batch to errors raised by the model, or by a hook between loading and backward."""
    try:
        yield
    except RankFailed:  # unrelated to the batch of this rank
        raise
    except Exception as error:
        with suppress(Exception):  # a batch that cannot be described must not hide the error itself
            _note_batch(error, experiment, choices)
        raise


def _note_batch(error: Exception, experiment: Experiment, choices: Choices) -> None:
    hook = hook_at_fault(error, experiment)
    step = _step(error)
    if hook is not None and hook.event in _OF_BATCH:
        error.add_note(f"with {_batch(error, hook.event in _WITH_OUTPUTS)}")
    elif hook is None and step is not None:
        context = f"in {_where(step, error)}, with {_batch(error, step in AFTER_FORWARD)}"
        error.add_note(f"{context}: {_chosen(experiment.model, choices)}, {_chosen(experiment.data, choices)}")
    if _is_device_assert(error):
        error.add_note(DEVICE_ASSERT)


def _describe(error: Exception, experiment: Experiment, choices: Choices) -> str:
    hook = hook_at_fault(error, experiment)
    step = _step(error)
    line = line_of_user(error)
    model = _chosen(experiment.model, choices)
    data = _chosen(experiment.data, choices)
    if hook is not None:
        text = _in_section(experiment.section_at(hook.path), error)
        when = "while closing" if hook.event is None else f"at {hook.event.name}"
        text += f"\n  {when}, with {model} and {data}"
    elif step is not None:
        batch = _batch(error, step in AFTER_FORWARD)
        text = f"{model} does not fit {data}. In {_where(step, error)}, with {batch}:\n  {_what(error)}"
        text += _missing_class(error, experiment) or _input_size(error, experiment)
    elif argument_of(error) in experiment.trainer:
        text = _in_section(experiment.trainer, error)
    elif isinstance(error, CONFIG_ERRORS):
        explanation = explain(error, sys.argv[1:], CONF)
        text = explanation.message
        line = None if line == explanation.place else line  # the message has it already
    else:
        text = _what(error)
    if group := facts_of(error).works_without:
        text += f"\n  it works without {group}"
    if _is_device_assert(error):
        text += f"\n  {DEVICE_ASSERT}"
    text += f"\n  raised in {line}" if line is not None else ""
    return text


def _in_section(section: Section, error: Exception) -> str:
    return f"{section.path}.{error}" if argument_of(error) in section else f"{section.path}: {_what(error)}"


def _chosen(section: Section, choices: Choices) -> str:
    """Return the choice for a group as an override: 'model=mlp', or 'model._target_=...'."""
    group = section.path
    return f"{group}={choices[group]}" if group in choices else f"{group}._target_={section.target}"


def _step(error: Exception) -> str | None:
    """Return the step of the model in which an error was raised, a key of `STEPS`; None while reading a batch.

    The innermost line of the loops decides, whatever other code it calls.
    """
    step = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _LOOPS.fullmatch(frame.f_globals.get("__name__", "")):
            calls = CALL.search(linecache.getline(frame.f_code.co_filename, line, frame.f_globals))
            step = calls[1] if calls is not None else step
    return step


def _where(step: str, error: Exception) -> str:
    """Return a phrase for a step of the model."""
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__))
    is_traced = step == "forward" and any(name.startswith("torch._dynamo.") for name in modules)
    return f"{STEPS[step]}{', as torch.compile traces it' if is_traced else ''}"


def _batch(error: Exception, with_outputs: bool) -> str:
    """Return a description of the batch at an error, and of its outputs in training."""
    batch = None
    outputs = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        state: Any = frame.f_locals.get("state")
        if frame.f_globals.get("__name__") == "runner.training.evaluation" and "batch" in frame.f_locals:
            batch = frame.f_locals["batch"]  # the state is back to that of training
            outputs = ""
        elif batch is None and getattr(state, "batch", None) is not None:
            batch = state.batch
            if with_outputs:
                outputs = f" and outputs of {describe_batch(getattr(state, 'outputs', None))}"
    if batch is None:
        return "a batch"
    return f"a batch of {describe_batch(batch, with_ranges=True)}{outputs}{_embedding(error)}"


def _embedding(error: Exception) -> str:
    """Return a phrase with the number of rows of the embedding whose lookup failed, or ''."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is functional.embedding.__code__:
            return f" and an embedding of {len(frame.f_locals['weight'])} rows"
    return ""


def _missing_class(error: Exception, experiment: Experiment) -> str:
    """Return how many outputs the largest class needs if a target is out of range, or ''."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        is_loss = frame.f_code in (functional.cross_entropy.__code__, functional.nll_loss.__code__)
        if is_loss and re.search(r"Target \d+ is out of bounds", str(error)):
            largest = int(frame.f_locals["target"].max())
            is_key = "num_classes" in experiment.model and not _has_weights(experiment)
            key = f": model.num_classes={largest + 1}" if is_key else ""
            return f"\n  class {largest} needs outputs for {largest + 1} classes{key}"
    return ""


def _input_size(error: Exception, experiment: Experiment) -> str:
    """Return which key of the model must match the input size of the layer that failed, or ''."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer, inputs = frame.f_locals.get("self"), frame.f_locals.get("input")
        if not isinstance(inputs, torch.Tensor):
            continue
        if isinstance(layer, nn.Linear):
            name, noun, size = "in_features", "number", inputs.shape[-1]
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            name, noun, size = "in_channels", "channel", inputs.shape[-1 - len(layer.kernel_size)]
        else:
            continue
        for section in experiment.model.nested():
            if section.get(name) == getattr(layer, name) != size:
                count = f"{size} {noun}{'s' * (size != 1)}, not {section.get(name)}"
                key = "" if _has_weights(experiment) else f": {section.path}.{name}={size}"
                return f"\n  an input has {count}{key}"
    return ""


def _has_weights(experiment: Experiment) -> bool:
    """Return whether the model loads weights, so that its sizes cannot change."""
    return experiment.trainer.get("load_path") is not None


def _is_device_assert(error: Exception) -> bool:
    return "device-side assert" in str(error)  # torch raises the same class for all CUDA errors


def _what(error: Exception) -> str:
    text = str(error)
    if isinstance(error, torch.AcceleratorError):
        text = text.partition("\n")[0]  # the other lines are the same for all of them
    message = " ".join(text.split())
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    says_enough = isinstance(error, WrongArgument) or type(error) in (ValueError, TypeError)
    return shown if says_enough else f"{type(error).__name__}: {shown}"
