"""Checks of the Trainer's arguments before anything is built from them, and the State that is made from them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pkgutil import resolve_name
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from runner.core.destination import LoggerDestination
from runner.core.engine import overrides
from runner.core.hook_checks import check_call, check_hooks
from runner.core.hooks import Algorithm, Callback, Hooks
from runner.core.ordering import name_hooks, order_algorithms
from runner.core.state import State
from runner.device.memory import collect_garbage
from runner.distributed.collectives import pick_device
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.sharding import Layout
from runner.failures.checks import check_session, check_subset, check_whole, refuse_if, refuse_one_shot
from runner.libraries.typed import is_mapping, is_sequence
from runner.models.model import Model
from runner.terminal.console import in_notebook
from runner.timing.event import Event
from runner.timing.time import Time, TimeUnit, exact_ratio
from runner.training.evaluator import Evaluator, interval_or_rule
from runner.training.precision import Precision


def check_arguments(
    *,
    max_duration: Any = "1ep",
    eval_interval: Any = "1ep",
    train_subset_num_batches: Any = None,
    iteration_length: Any = None,
    session: Any = None,
    precision: Any = "fp32",
    grad_accum: Any = 1,
    microbatch_size: Any = None,
    device: Any = "auto",
    seed: Any = 0,
    parallel: Any = "ddp",
    shard_size: Any = None,
    gather_dtype: Any = None,
    tensor_parallel: Any = 1,
    scale_schedule_ratio: Any = 1.0,
    ranks: int | str = "auto",
) -> None:
    """Check the arguments of the Trainer that can be checked without a model or data.

    `ranks` is the number of ranks that will be started on this machine; 'auto' if it is not known yet.
    """
    check_duration(max_duration)
    exact_ratio(scale_schedule_ratio)
    interval_or_rule(eval_interval)
    check_subset("train_subset_num_batches", train_subset_num_batches)
    check_iteration_length(iteration_length)
    check_session(session)
    check_microbatches(grad_accum, microbatch_size)
    Precision(precision).check(pick_device(device))
    check_whole("seed", seed, 0)
    layout = Layout(parallel, shard_size, gather_dtype, tensor_parallel)
    if get_world_size() > 1:
        layout.check_ranks(get_world_size())
    elif isinstance(ranks, int) and tensor_parallel * (shard_size or 1) % ranks:
        layout.check_ranks(ranks)  # a multiple of `ranks` may still fit on several machines


def make_state(
    model: Model,
    device: str | torch.device,
    precision: str,
    seed: int,
    run_name: str | None,
    config: Mapping[str, Any] | None,
    max_duration: str | int | Time,
    grad_accum: int,
    microbatch_size: int | str | None,
) -> State:
    """Return the State with which a run begins, from the Trainer's arguments of the same names."""
    check_model(model)
    check_microbatches(grad_accum, microbatch_size)
    check_whole("seed", seed, 0)
    chosen = pick_device(device)
    collect_garbage(chosen)
    return State(
        unwrapped_model=model,
        model=model,
        device=chosen,
        precision=Precision(precision),
        rank_zero_seed=seed,
        run_name=run_name or "",
        config=dict(config or {}),
        max_duration=check_duration(max_duration),
        grad_accum=grad_accum,
        microbatch_size=microbatch_size,
    )


def check_duration(value: str | int | Time, name: str = "max_duration") -> Time:
    """Return a length of training as a Time, after checking it; an int counts epochs."""
    duration = Time.parse_or_epochs(value, name)
    is_wrong = duration.unit in (TimeUnit.DURATION, TimeUnit.ITERATION) or duration.value <= 0
    refuse_if(is_wrong, name, value, "must be more than 0, in ep, ba, sp, tok or seconds, such as '10ep', '1h'")
    return duration


def check_trainable(state: State, may_be_over: bool = False) -> None:
    """Check that `fit` can start, and that it will end.

    Raises:
        ValueError: the data or the optimizers are missing, tokens are not counted, or there is nothing left to train.
    """
    if state.train_dataloader is None or not state.optimizers:
        missing = "train_dataloader" if state.train_dataloader is None else "optimizers"
        raise ValueError(f"{missing}=None: fit() needs it; pass it to the Trainer")
    duration = f"max_duration={str(state.max_duration)!r}"
    model = type(state.unwrapped_model)
    if state.max_duration.unit is TimeUnit.TOKEN and model.num_tokens is Model.num_tokens:
        raise ValueError(f"{duration}: {model.__name__} does not count tokens; override num_tokens, or use ep, ba, sp")
    if state.timestamp >= state.max_duration and not may_be_over:
        raise ValueError(f"{duration} is reached: nothing left to train; call fit('1ep'), or raise max_duration")
    refuse_one_shot(state)


def check_model(model: Any) -> None:
    """Check that a model is a `Model`, and that its methods accept the trainer's calls."""
    kind = type(model).__name__
    if not isinstance(model, Model):
        raise TypeError(f"model={kind}: must be a runner.Model; ClassificationModel and others wrap a module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"model={kind}: {name} has no shape yet; run a batch through its lazy module first")
    check_call(model, "forward", ["batch"])
    for name, parameters in (("training_step", ["state"]), ("slice_batch", ["batch", "start", "end"])):
        if getattr(model, name) is not None:
            check_call(model, name, parameters)
    for name, method in vars(Model).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            check_call(model, name, [*inspect.signature(method).parameters][1:])


def check_iteration_length(value: str | int | Time | None) -> Time | None:
    """Return the length of an iteration in epochs; None if the whole run is one iteration."""
    if value is None:
        return None
    length = Time.parse_or_epochs(value, "iteration_length")
    is_wrong = length.unit is not TimeUnit.EPOCH or length.value <= 0
    refuse_if(is_wrong, "iteration_length", value, "must be in epochs and more than 0, such as '2ep'")
    return length


def check_microbatches(grad_accum: int, microbatch_size: int | str | None) -> None:
    """Check the two ways to split batches, only one of which can be used at a time."""
    check_whole("grad_accum", grad_accum, 1)
    if microbatch_size != "auto":
        check_whole("microbatch_size", microbatch_size, 1, "'auto' or a whole number", none="whole batches")
    if microbatch_size is not None and grad_accum > 1:
        raise ValueError(f"grad_accum={grad_accum!r} and microbatch_size={microbatch_size!r} cannot be combined")


def check_evaluator(evaluator: Evaluator, train_dataloader: Any) -> None:
    """Check that an evaluator can read its data while training reads its own."""
    if evaluator.dataloader is train_dataloader and getattr(train_dataloader, "persistent_workers", False):
        remedy = "its persistent workers can only read one pass at a time; use a separate loader or DatasetLoader"
        raise ValueError(f"evaluator {evaluator.label!r}: dataloader is the train_dataloader: {remedy}")


_UNSEEN = (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD)


def refuse_unseen_hooks(state: State) -> None:
    """Refuse hooks that would never be called because the model has its own `training_step`."""
    model = type(state.unwrapped_model).__name__
    if state.unwrapped_model.training_step is None:
        return
    if state.train_metrics:
        raise ValueError(f"{model}.metrics(train=True) must return {{}}: its own training_step provides no outputs")
    for hook, event in product((*state.algorithms, *state.callbacks, *state.loggers), _UNSEEN):
        if overrides(hook, event):
            why = "its own training_step does forward, loss and backward. Remove one of them."
            raise ValueError(f"{type(hook).__name__} acts at {event.name}, which does not happen with {model}: {why}")
    if state.unwrapped_model.manual_optimization:
        _refuse_before_own_steps(state, model)


def _refuse_before_own_steps(state: State, model: str) -> None:
    """Refuse everything that acts between backward and the optimizer steps, because the model does both itself."""
    if state.grad_accum > 1 or state.microbatch_size is not None:
        key = "grad_accum" if state.grad_accum > 1 else "microbatch_size"
        raise ValueError(f"{key}: {model} has manual_optimization, and steps with the whole batch; leave {key} out")
    for algorithm in state.algorithms:
        if overrides(algorithm, Event.AFTER_TRAIN_BATCH):
            why = f"{model} has manual_optimization, and has stepped by then. Do it in its training_step instead."
            raise ValueError(f"{type(algorithm).__name__} acts on gradients before optimizers step: {why}")


def split_schedulers(schedulers: Any) -> tuple[list[Any], list[Algorithm]]:
    """Return the schedulers that are functions of time, and those that are algorithms."""
    if not is_sequence(schedulers):
        schedulers = [] if schedulers is None else [schedulers]
    acting = [scheduler for scheduler in schedulers if isinstance(scheduler, Algorithm)]
    for algorithm in acting:
        algorithm.config_key = algorithm.config_key or "scheduler"
    return [scheduler for scheduler in schedulers if not isinstance(scheduler, Algorithm)], acting


OrderedHooks = tuple[tuple[Algorithm, ...], tuple[Callback, ...], tuple[LoggerDestination, ...]]


def ordered_hooks(
    algorithms: Any,
    callbacks: Any,
    loggers: Any,
    acting: Sequence[Algorithm] = (),
    progress_bar: bool | None = False,
) -> OrderedHooks:
    """Return the algorithms, the callbacks and the destinations active on this rank, named and in order.

    Args:
        algorithms: algorithms as the Trainer takes them.
        callbacks: callbacks as the Trainer takes them.
        loggers: destinations as the Trainer takes them.
        acting: the algorithms that were given as schedulers.
        progress_bar: whether to add a progress bar; None: on a terminal and in a notebook.
    """
    hooks = [*_listed("callbacks", callbacks, Callback), *_listed("loggers", loggers, LoggerDestination)]
    hooks = name_hooks([*hooks, *_progress_bars(hooks, progress_bar)])
    ordered = order_algorithms(name_hooks([*_listed("algorithms", algorithms, Algorithm), *acting]))
    for hook in (*ordered, *hooks):
        if hook.has_trained and hook.state_dict():
            raise ValueError(f"{hook.config_key}: still has the state of another Trainer; create a new one")
    destinations = (hook for hook in hooks if isinstance(hook, LoggerDestination))
    return (
        tuple(ordered),
        tuple(hook for hook in hooks if not isinstance(hook, LoggerDestination)),
        tuple(destination for destination in destinations if destination.all_ranks or get_global_rank() == 0),
    )


def _progress_bars(hooks: Sequence[Hooks], is_wanted: bool | None) -> list[Any]:
    """Return the progress bar to add to the hooks, as a list; empty if they have one, or if nobody would see it.

    This is the only callback that the Trainer adds by name, because training without output looks hung.
    """
    if is_wanted is None:
        is_wanted = in_notebook() or sys.stdout.isatty()
    if not is_wanted or any(type(hook).__name__ == "ProgressBar" for hook in hooks):
        return []
    return [resolve_name("runner.callbacks:ProgressBar")()]


def _listed(name: str, value: Any, kind: type[Hooks]) -> list[Any]:
    """Return a list from a single object, a sequence, or a mapping, whose keys become the objects' config keys."""
    value = () if value is None else value
    if is_mapping(value):
        for key, hook in value.items():
            _check_kind(f"{name}.{key}", hook, kind)
            hook.config_key = hook.config_key or key
        return [*value.values()]
    hooks = [value] if isinstance(value, Hooks | type) else [*value]
    for hook in hooks:
        _check_kind(name, hook, kind)
    return hooks


def _check_kind(name: str, value: object, kind: type[Hooks]) -> None:
    """Check that a value is an instance of a subclass of `kind`, with hooks that can be called."""
    if isinstance(value, kind):
        check_hooks(value)
        return
    repr_is_useless = isinstance(value, Hooks) or type(value).__repr__ is object.__repr__  # it shows only an address
    shown = type(value).__name__ if repr_is_useless else repr(value)
    if isinstance(value, type) and issubclass(value, kind):
        raise TypeError(f"{name}={value.__name__}: this is a class; pass an instance, {value.__name__}(...)")
    for group, base in (("algorithms", Algorithm), ("callbacks", Callback)):
        if isinstance(value, base):
            raise TypeError(f"{name}={shown}: belongs in {group}, because it is a subclass of runner.{base.__name__}")
    raise TypeError(f"{name}={shown}: must be an instance of a subclass of runner.{kind.__name__}")
