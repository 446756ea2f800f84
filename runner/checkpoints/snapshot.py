"""Capture the content of a checkpoint from a run, and restore a run from one.

A checkpoint is a folder:

- `model.pt`: the weights that evaluations measure; with an averaging algorithm, these are the averaged weights.
- `state.pt`: everything else that a resumed run needs; with an averaging algorithm, also the weights in training.
- `base.json`, if the model has frozen weights of a named model, which are then left out: its name and digest.
- `config.json`: the resolved config of the run, for comparison.
- `shard-00000-of-00002.safetensors` and so on, if it is sharded: see `runner.checkpoints.shards`.
- `manifest.json`: size and SHA-256 of each file, and the training time. Folders without a valid one are not used.

Everything is tensors, numbers, strings, lists and dicts, loaded with `weights_only=True`: nothing is unpickled.
The timestamp determines the position in the data and the streams of random numbers: see `runner.core.randomness`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.checkpoints.base import describe_bases, state_to_save
from runner.checkpoints.contents import map_saved
from runner.checkpoints.copies import Copies, to_host
from runner.checkpoints.files import MODEL_CONFIG, Snapshot, find_checkpoint, read_file, verify_together
from runner.checkpoints.manifest import read_manifest
from runner.checkpoints.metric_states import load_metric_states, metric_states
from runner.checkpoints.shards import should_shard
from runner.checkpoints.weights import is_weights_file, load_all_into, read_weights
from runner.checkpoints.writing import write_checkpoint
from runner.core.engine import evaluation_weights, overrides
from runner.core.hooks import Algorithm, Hooks
from runner.core.state import State
from runner.device.staging import staging
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.saved_tensor import ShardLayout, layout_of
from runner.distributed.sharding import is_sharded, whole
from runner.failures.errors import UnreadableCheckpoint, UnsupportedType
from runner.optim.freezing import describe_freezing, restore_freezing
from runner.optim.fused import load_optimizer
from runner.timing.time import Timestamp

log = logging.getLogger("runner")


def save_checkpoint(state: State, path: str | Path, weights_only: bool = False, sharded: bool | None = None) -> None:
    """Write a checkpoint folder at `path`, completely or not at all. Call it on all ranks; rank 0 writes.

    Args:
        state: the run, between two batches.
        path: the folder to write; an existing checkpoint is replaced once the new one is complete.
        weights_only: whether to leave out `state.pt`; such a checkpoint can be evaluated, but not resumed from.
        sharded: whether each rank of a sharded model writes its part; None: only if rank 0 has too little memory.

    Raises:
        FileExistsError: `path` exists and is not a checkpoint.
        OSError: the disk is full or the folder is read-only; no partial checkpoint is left behind.
    """
    write_checkpoint(capture(state, weights_only, sharded=sharded), path)


@torch.no_grad()
def capture(
    state: State, weights_only: bool = False, copies: Copies | None = None, sharded: bool | None = None
) -> Snapshot | None:
    """Return the content of a checkpoint on the CPU; None on ranks other than 0 unless it is sharded. All ranks.

    Args:
        state: the run, between two batches.
        weights_only: whether to leave out `state.pt`, which only a resumed run needs.
        copies: copies tensors, so that training can continue during the write; None: CPU tensors are the run's own.
        sharded: as in `save_checkpoint`.
    """
    layouts: dict[int, ShardLayout] | None = {} if should_shard(state, sharded) else None
    metrics = metric_states(state)
    for hook in _gathering(state):
        hook.gather_state()
    if get_global_rank() != 0 and not is_sharded(state.unwrapped_model):
        return None  # with a sharded model, all ranks must help to gather each tensor

    to_save = partial(_map_to_cpu, copies=copies, layouts=layouts)
    is_averaged = any(type(hook).evaluation_weights is not Algorithm.evaluation_weights for hook in state.algorithms)
    with evaluation_weights(state):
        # The averaged weights are swapped into these tensors: copy them before the training weights are swapped back.
        weights = _weights(state.unwrapped_model, copies or (Copies() if is_averaged else None), layouts)
    snapshot: Snapshot = {
        "timestamp": state.timestamp.state_dict(),
        "model.pt": weights,
        **describe_bases(state.unwrapped_model),
        **({MODEL_CONFIG: state.config} if state.config else {}),
        **({"layouts": layouts} if layouts is not None else {}),
    }
    if not weights_only:
        snapshot["state.pt"] = {
            "algorithms": _states(state.algorithms, to_save),
            "callbacks": _states([*state.callbacks, *state.loggers], to_save),
            "model": _weights(state.unwrapped_model, copies, layouts) if is_averaged else None,
            **to_save({
                "timestamp": state.timestamp.state_dict(),
                "previous_timestamp": state.previous_timestamp.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
                "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
                "scaler": state.scaler.state_dict() if state.scaler is not None else None,
                "train_metrics": metrics,
                "train_metric_values": state.train_metric_values,
                "eval_metric_values": state.eval_metric_values,
                "evaluated_at": {evaluator.label: evaluator.evaluated_at for evaluator in state.evaluators},
                "order": _order(state),
                "frozen": describe_freezing(state.unwrapped_model),
                "microbatch_size": state.samples_per_microbatch,
                "stop_requested": state.stop_requested,
                "unfinished_hooks": state.unfinished_hooks,
                "seed": state.rank_zero_seed,
                "run_name": state.run_name,
                "world_size": get_world_size(),
            }),
        }  # fmt: skip
    if copies is not None:
        copies.finish()
    if state.device.type == "cuda":
        staging(state.device).finish()  # The intended host-device sync: all copies at once.
    return snapshot if get_global_rank() == 0 or layouts is not None else None


def can_save_on_this_rank(state: State) -> bool:
    """Return whether this rank can save a checkpoint alone, after an error that other ranks may not have had.

    It can if it is rank 0, its state is consistent, and no other rank holds accumulators of training metrics, state
    that a hook gathers, or a part of the model.
    """
    # Other ranks hold metrics or hook state until TrainMetrics, or the hook, has handled the end of the epoch.
    holders = [*(["train_metrics"] if state.train_metrics else []), *(hook.config_key for hook in _gathering(state))]
    unfinished = {key for keys in state.unfinished_hooks.values() for key in keys}
    is_spread = get_world_size() > 1 and bool(holders if state.timestamp.batch_in_epoch else unfinished & {*holders})
    has_all = not is_spread and not is_sharded(state.unwrapped_model)
    return state.is_consistent and get_global_rank() == 0 and has_all


def _gathering(state: State) -> list[Hooks]:
    return [hook for hook in (*state.algorithms, *state.callbacks) if overrides(hook, "gather_state")]


def load_weights(state: State, path: str | Path, strict: bool = True) -> None:
    """Load a checkpoint's `model.pt`, the weights that evaluations measured, into the model. All ranks.

    Args:
        state: the run; only its model changes.
        path: the folder of a checkpoint or a run, or a file that `runner export` wrote.
        strict: whether to raise if names differ; otherwise matching weights are loaded, with a warning.

    Raises:
        ValueError: names or shapes differ; the message lists all of them.
        FileNotFoundError: `path` holds no checkpoint.
    """
    model = state.unwrapped_model
    path = path if is_weights_file(Path(path)) else find_checkpoint(path, verify_together)
    load_all_into(model, read_weights(path, model), path, strict)


def read_timestamp(path: str | Path) -> Timestamp:
    """Return the training time of the checkpoint in a folder."""
    return read_manifest(Path(path)).timestamp


@contextmanager
def weights_of(state: State, path: str | Path) -> Iterator[None]:
    """Use a checkpoint's weights in the model and its time in the state within the `with` block.

    Raises:
        ValueError: the weights do not fit the model, or the checkpoint was modified.
        FileNotFoundError: `path` holds no checkpoint.
    """
    path = find_checkpoint(path)
    model = state.unwrapped_model
    timestamp = state.timestamp
    weights = {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }
    try:
        load_all_into(model, read_file(path, "model.pt"), path, strict=True)
        state.timestamp = read_timestamp(path)
        yield
    finally:
        state.timestamp = timestamp
        model.load_state_dict(weights, strict=False)  # quantized layers have entries that they do not load


def restore(state: State, path: str | Path) -> None:
    """Restore everything that a checkpoint holds, so that training continues as if it had not stopped. All ranks.

    Raises:
        ValueError: the checkpoint does not fit this run, or contains only weights.
        FileNotFoundError: `path` holds no checkpoint.
    """
    path = find_checkpoint(path, verify_together)
    if not (path / "state.pt").exists():
        raise ValueError(
            f"checkpoint {str(path)!r} holds only weights: start from it with load_path, or resume another"
        )
    saved = read_file(path, "state.pt")
    _check_order(path, saved, state)
    weights = read_file(path, "model.pt") if saved["model"] is None else saved["model"]
    load_all_into(state.unwrapped_model, weights, path, strict=True)
    restore_freezing(state.unwrapped_model, saved["frozen"])
    for kind, items in (("optimizers", state.optimizers), ("schedulers", state.schedulers)):
        if len(saved[kind]) != len(items):
            raise ValueError(
                f"checkpoint {str(path)!r} has {len(saved[kind])} {kind}, this run has {len(items)}: use as many"
            )
        for item, part in zip(items, saved[kind], strict=True):
            try:
                load_optimizer(item, part) if kind == "optimizers" else item.load_state_dict(part)
            except (LookupError, TypeError, AttributeError) as error:
                reason = f"its state of {type(item).__name__} cannot be used ({type(error).__name__}: {error})"
                raise UnreadableCheckpoint(f"checkpoint {str(path)!r}: {reason}") from error
    optimizers: list[Any] = state.optimizers
    for optimizer in optimizers:
        optimizer._opt_called = True  # else torch's schedulers warn that they step before the optimizer
    if state.scaler is not None and saved["scaler"] is not None:
        state.scaler.load_state_dict(saved["scaler"])
    _load_states(state.algorithms, saved["algorithms"])
    _load_states([*state.callbacks, *state.loggers], saved["callbacks"])
    load_metric_states(state, saved["train_metrics"])
    state.timestamp = Timestamp.from_state_dict(saved["timestamp"])
    state.previous_timestamp = Timestamp.from_state_dict(saved.get("previous_timestamp", saved["timestamp"]))
    state.train_metric_values = saved["train_metric_values"]
    state.eval_metric_values = saved["eval_metric_values"]
    for evaluator in state.evaluators:
        evaluator.evaluated_at = saved["evaluated_at"].get(evaluator.label)
    state.stop_requested = saved.get("stop_requested", False)
    state.unfinished_hooks = saved.get("unfinished_hooks", {})
    state.resumed_from = path
    if state.microbatch_size == "auto":
        state.fitting_size = saved["microbatch_size"]


def _order(state: State) -> dict[str, Any]:
    """Return the settings that determine each batch's samples; empty for a loader without them, or a stand-in."""
    loader = state.train_dataloader
    order = None if getattr(loader, "is_fake", False) else getattr(loader, "order", None)
    names = ("num_samples", "batch_size", "shuffle", "drop_last", "seed", "blocks")
    return getattr(loader, "order_settings", {name: getattr(order, name) for name in names if hasattr(order, name)})


def _check_order(path: Path, saved: Mapping[str, Any], state: Any) -> None:
    """Raise ValueError if the rest of the epoch would repeat or skip samples."""
    order = _order(state)
    before = saved.get("order", {})
    timestamp = Timestamp.from_state_dict(saved["timestamp"])
    changes = [f"{name} {before[name]} -> {value}" for name, value in order.items() if before.get(name, value) != value]
    if changes and timestamp.batch_in_epoch > 0:
        raise ValueError(
            f"checkpoint {str(path)!r} was saved mid-epoch, after {timestamp.sample_in_epoch} samples, and the "
            f"order of batches has changed: {', '.join(changes)}; continuing would repeat or skip samples. Undo that "
            f"change, or begin after batch {timestamp.batch - timestamp.batch_in_epoch}, at the start of that epoch"
        )
    if (samples := order.get("num_samples")) != before.get("num_samples", samples) and get_global_rank() == 0:
        log.warning("the training data has changed: %s -> %s samples", before["num_samples"], samples)
    if "num_samples" in order and timestamp.batch_in_epoch > len(state.train_dataloader.order):
        raise UnreadableCheckpoint(f"checkpoint {str(path)!r}: an epoch has no batch {timestamp.batch_in_epoch}")


def _weights(model: nn.Module, copies: Copies | None, layouts: dict[int, ShardLayout] | None) -> dict[str, Any]:
    """Return a model's `state_dict` on the CPU, without its base; tied weights stay tied."""
    weights = state_to_save(model)
    on_cpu: dict[int, Any] = {}
    for name, value in weights.items():
        if id(value) not in on_cpu:
            with _naming_owner(f"{name!r} of the model's state_dict()"):
                on_cpu[id(value)] = _map_to_cpu(value, copies, layouts)
    if copies is not None:
        copies.finish()
    return {name: on_cpu[id(value)] for name, value in weights.items()}


def _map_to_cpu(value: Any, copies: Copies | None, layouts: dict[int, ShardLayout] | None) -> Any:
    return map_saved(value, lambda tensor: _to_cpu(tensor, copies, layouts))


def _to_cpu(tensor: Any, copies: Copies | None, layouts: dict[int, ShardLayout] | None) -> Tensor:
    """Return the CPU tensor to write: of a sharded one, the whole, or this rank's part if `layouts` is given."""
    if not is_sharded(tensor):
        tensor = tensor.detach()
        # A dry run allocates no memory.
        return tensor if tensor.is_meta or get_global_rank() != 0 else to_host(tensor, copies)
    if layouts is None:
        gathered = whole(tensor)
        return gathered.cpu() if get_global_rank() == 0 else gathered.new_empty(0)
    layout = layout_of(tensor)
    local = tensor.to_local()
    part = to_host(local, copies) if layout.is_first_copy else local.new_empty(0, device="cpu")
    layouts[id(part)] = layout
    return part


def _states(hooks: Any, to_save: Callable[[Any], Any]) -> dict[str, Any]:
    states = {}
    for hook in hooks:
        with _naming_owner(f"{type(hook).__name__}.state_dict()"):
            if hook_state := hook.state_dict():
                states[hook.config_key] = to_save(hook_state)
    return states


@contextmanager
def _naming_owner(owner: str) -> Iterator[None]:
    """Name the owner of the state in TypeErrors raised within the `with` block."""
    try:
        yield
    except TypeError as error:
        reason = f"it holds a {error.type_name}" if isinstance(error, UnsupportedType) else str(error)
        allowed = "tensors, numbers, strings, lists and dicts"
        raise TypeError(f"{owner} cannot be saved: {reason}; return {allowed}") from None


def _load_states(hooks: list[Hooks] | tuple[Hooks, ...], saved: Mapping[str, Any]) -> None:
    for hook in hooks:
        if hook.config_key in saved:
            hook.load_state_dict(saved[hook.config_key])
    for key in saved.keys() - {hook.config_key for hook in hooks}:
        if get_global_rank() != 0:
            break  # only rank 0 has destinations
        log.warning("the checkpoint's state of %r is not used: nothing in this run has that name", key)
