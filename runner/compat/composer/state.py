"""Composer's state: a view of the run's own state, made for each call of a hook."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.checkpoints import snapshot
from runner.compat.composer import absent
from runner.compat.composer.time import Time, Timestamp
from runner.core.state import State as OurState
from runner.device.batch import to_device
from runner.distributed.ranks import get_data_parallel_size, get_world_size
from runner.distributed.sharding import is_sharded
from runner.timing.time import Time as OurTime
from runner.training.precision import Precision

_IN_MICROBATCH = ("before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward")
_WRITABLE = ("loss", "outputs", "train_metrics", "eval_metrics")
_FIELDS = {field.name for field in dataclasses.fields(OurState)}


class State:
    """Composer's view of the state.

    Differences from Composer: `batch` is the whole batch outside a microbatch, `eval_metric_values` also has the mean
    loss as 'loss', and new attributes are refused. `unwrapped` is this library's state, for functions of `runner`.

    Args:
        state: the run's state.
        event: the value of the event that calls the hook.
    """

    __slots__ = ("hook_event", "unwrapped")

    def __init__(self, state: OurState, event: str) -> None:
        object.__setattr__(self, "unwrapped", state)
        object.__setattr__(self, "hook_event", event)

    def __getattr__(self, name: str) -> Any:
        if name in absent.SWITCHED_OFF:
            return absent.SWITCHED_OFF[name]
        if name in absent.READ:
            raise absent.missing("state", name, absent.READ)
        try:
            return getattr(self.unwrapped, name)
        except AttributeError:
            reason = "has no value yet" if name in _FIELDS else "is not an attribute of the state"
            raise AttributeError(f"state.{name} {reason} at {self.hook_event.upper()}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = getattr(type(self), name, None)
        if isinstance(attribute, property) and attribute.fset is not None:
            object.__setattr__(self, name, value)
        elif name in _WRITABLE:
            setattr(self.unwrapped, name, value)
        else:
            remedy = absent.WRITTEN.get(name, f"keep it on the callback or algorithm, as self.{name}")
            raise AttributeError(f"state.{name} cannot be set here: {remedy}")

    def __repr__(self) -> str:
        return f"{self.unwrapped!r} at {self.hook_event.upper()}"

    @property
    def timestamp(self) -> Timestamp:
        """Progress of training over all ranks."""
        return Timestamp(*self.unwrapped.timestamp)

    @property
    def previous_timestamp(self) -> Timestamp:
        """Progress before time last advanced."""
        return Timestamp(*self.unwrapped.previous_timestamp)

    @property
    def eval_timestamp(self) -> Timestamp:
        """Progress of the current evaluator."""
        return Timestamp(*self.unwrapped.eval_timestamp)

    @property
    def predict_timestamp(self) -> Timestamp:
        """Progress of the current prediction."""
        return Timestamp(*self.unwrapped.predict_timestamp)

    @property
    def max_duration(self) -> Time:
        """The length of training. If it is set to a time that has passed, training ends after this batch."""
        return Time.from_input(self.unwrapped.max_duration)

    @max_duration.setter
    def max_duration(self, value: Any) -> None:
        length = Time.from_input(value, "ep")
        self.unwrapped.max_duration = OurTime(length.value, length.unit)

    def get_elapsed_duration(self) -> Time:
        """Return the fraction of `max_duration` that has passed, in 'dur'."""
        return Time.from_input(self.unwrapped.get_elapsed_duration())

    @property
    def batch(self) -> Any:
        """The microbatch between BEFORE_FORWARD and AFTER_BACKWARD, otherwise the whole batch."""
        return self.unwrapped.microbatch if self.hook_event in _IN_MICROBATCH else self.unwrapped.batch

    @batch.setter
    def batch(self, value: Any) -> None:
        setattr(self.unwrapped, "microbatch" if self.hook_event in _IN_MICROBATCH else "batch", value)

    def batch_get_item(self, key: Any) -> Any:
        """Return a part of the batch.

        Args:
            key: a position, a key or an attribute, a list of these, a function of the batch, or a pair of functions
                that read and write the part.
        """
        get = key[0] if _is_pair_of_functions(key) else key
        if callable(get):
            return get(self.batch)
        if isinstance(key, list | tuple):
            return [_item(self.batch, part_key) for part_key in key]
        return _item(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace a part of the batch; `key` is as in `batch_get_item`, except that it cannot be a single function."""
        if _is_pair_of_functions(key):
            self.batch = key[1](self.batch, value)
            return
        parts = zip(key, value, strict=True) if isinstance(key, list | tuple) else [(key, value)]
        for part_key, part in parts:
            self.batch = _with_item(self.batch, part_key, part)

    @property
    def dataloader_len(self) -> Time | None:
        """Batches in a pass over the current dataloader; None if it has no length."""
        length = self.unwrapped.dataloader_len
        return None if length is None else Time.from_batch(length)

    @property
    def device(self) -> Device:
        """The device of this rank."""
        return Device(self.unwrapped.device)

    @property
    def device_train_microbatch_size(self) -> int | None:
        """Samples per microbatch on this rank; None before the first batch if batches are not split by size."""
        state = self.unwrapped
        if state.samples_per_microbatch is not None or not hasattr(state, "batch"):
            return state.samples_per_microbatch
        return -(-state.unwrapped_model.num_samples(state.batch) // state.grad_accum)

    @device_train_microbatch_size.setter
    def device_train_microbatch_size(self, value: int) -> None:
        if self.unwrapped.microbatch_size == "auto":
            self.unwrapped.fitting_size = int(value)
        elif self.unwrapped.microbatch_size is not None:
            self.unwrapped.microbatch_size = int(value)
        else:
            remedy = "give trainer.microbatch_size a size, or auto; then it can be changed"
            raise AttributeError(f"state.device_train_microbatch_size cannot be set here: {remedy}")

    @property
    def auto_microbatching(self) -> bool:
        """Whether the size of microbatches is chosen automatically."""
        return self.unwrapped.microbatch_size == "auto"

    @property
    def eval_metric_values(self) -> dict[str, Any]:
        """The latest results of all evaluators by metric name; for a shared name, those of the last evaluator."""
        return {name: value for values in self.unwrapped.eval_metric_values.values() for name, value in values.items()}

    @property
    def total_loss_dict(self) -> dict[str, Tensor]:
        """The detached loss of this rank's batch: its total, and its parts by name."""
        parts = {"total": self.unwrapped.total_loss, **self.unwrapped.loss_parts}
        return {f"loss/train/{name}": value for name, value in parts.items()}

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers, each with `get_last_lr()`."""
        schedulers = self.unwrapped.schedulers
        return [item if hasattr(item, "get_last_lr") else _Rates(item) for item in schedulers]

    @property
    def deterministic_mode(self) -> bool:
        """Whether torch uses deterministic algorithms only."""
        return torch.are_deterministic_algorithms_enabled()

    @property
    def tp_enabled(self) -> bool:
        """Whether several ranks hold one model and see the same samples."""
        return get_data_parallel_size() < get_world_size()

    @property
    def is_model_ddp(self) -> bool:
        """Whether the model is wrapped for data-parallel training."""
        return isinstance(self.unwrapped.model, DistributedDataParallel)

    @property
    def fsdp_enabled(self) -> bool:
        """Whether the model is sharded."""
        return is_sharded(self.unwrapped.unwrapped_model)


class Device:
    """A torch device with Composer's attributes and methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = {"cuda": "gpu"}.get(device.type, device.type)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.device, name):
            raise absent.missing("device", name, absent.DEVICE)
        return getattr(self._device, name)

    def __str__(self) -> str:
        return str(self._device)

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """Return a module, moved to the device."""
        return module.to(self._device)

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device."""
        return tensor.to(self._device, non_blocking=True)

    def batch_to_device(self, batch: Any) -> Any:
        """Return a batch on the device."""
        return to_device(batch, self._device)


class _Rates:
    """This library's schedules with the attributes and methods of torch's schedulers."""

    def __init__(self, rates: Any) -> None:
        self._rates = rates

    def __getattr__(self, name: str) -> Any:
        if name in absent.SCHEDULERS or not hasattr(self._rates, name):
            raise absent.missing("scheduler", name, absent.SCHEDULERS)
        return getattr(self._rates, name)

    @property
    def base_lrs(self) -> list[float]:
        """The base rate of each parameter group, without any schedule."""
        return self._rates.state_dict()["base_rates"]

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._rates.optimizer.param_groups]


def _is_pair_of_functions(key: Any) -> bool:
    return isinstance(key, tuple | list) and len(key) == 2 and all(map(callable, key))


def _item(batch: Any, key: Any) -> Any:
    return getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]


def _with_item(batch: Any, key: Any, value: Any) -> Any:
    """Replace a part of a batch, and return the batch: a new one if it is a tuple, otherwise the same."""
    if isinstance(batch, tuple):
        position = batch._fields.index(key) if isinstance(key, str) else range(len(batch))[key]  # type: ignore[attr-defined]
        items = [value if index == position else item for index, item in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(key, int) or hasattr(batch, "__setitem__"):
        batch[key] = value
    else:
        setattr(batch, key, value)
    return batch


def get_precision_context(precision: Precision | str, device: str = "cpu") -> AbstractContextManager[Any]:
    """Return the autocast context of a precision for a forward pass on a type of device."""
    dtypes = {Precision.AMP_BF16: torch.bfloat16, Precision.AMP_FP16: torch.float16}
    dtype = dtypes.get(Precision(precision))
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def save_checkpoint(state: State, filename: str = "ep{epoch}-ba{batch}", *, weights_only: bool = False) -> Path:
    """Write a checkpoint and return its folder. Call it on all ranks.

    Args:
        state: the view that a hook got.
        filename: the folder to write; `{epoch}`, `{batch}` and other fields of the timestamp, and `{run_name}`, are
            filled in.
        weights_only: leave out the state that only a resumed run needs.
    """
    ours = state.unwrapped
    path = Path(filename.format(**ours.timestamp._asdict(), run_name=ours.run_name, rank=0))
    snapshot.save_checkpoint(ours, path, weights_only)
    return path
