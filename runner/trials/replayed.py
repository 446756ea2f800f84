"""Records one batch: the loss of each sample, norms, and what each algorithm changed at each event."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runner.checkpoints.digest import norm
from runner.checkpoints.hashing import digest
from runner.core.hooks import Algorithm, Callback, Handler, Hooks
from runner.core.logger import Logger
from runner.core.state import State
from runner.device.batch import map_tensors, split
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import is_sharded, whole
from runner.models.loss import total_of
from runner.models.sample_losses import sample_losses
from runner.timing.event import Event

_EVENTS = list(Event)
OF_BATCH = tuple(_EVENTS[_EVENTS.index(Event.BEFORE_DATALOADER) : _EVENTS.index(Event.BATCH_END) + 1])
"""The events of a batch, in the order in which they fire."""


class Act(NamedTuple):
    """The changes that an algorithm made at an event of the batch."""

    algorithm: str
    event: str
    changed: list[str]
    """Texts such as 'batch' or 'gradients norm 3.2 -> norm 1'."""


@dataclass(frozen=True)
class Sample:
    """A sample of the batch, as the loss saw it."""

    index: int | None
    """Its number in the data set; None if unknown."""
    loss: float
    position: int
    """Its index in the batch."""


class ReplayedBatch(Callback):
    """Records one batch on rank 0, or on all ranks if weights are sharded, and changes nothing.

    With `debug`, it stops in the debugger before the first forward pass.
    """

    def __init__(self, batch: int, debug: bool = False) -> None:
        self.batch = batch
        self.debug = debug
        self.is_done = False
        self.state: State | None = None
        self.epoch = 0
        self.loss = 0.0
        self.acts: list[Act] = []
        self.indices: list[int | None] = []
        self.losses: list[float] = []
        self.no_losses = ""  # why there are no losses; empty if there are
        self.gradients: dict[str, float] = {}
        self.activations: dict[str, float] = {}
        self.rates: list[float] = []
        self.microbatches: list[Any] = []  # as the model saw them
        self.outputs: list[Any] = []
        self.gradient_values: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def samples(self) -> list[Sample]:
        """The samples of rank 0's share with a known loss, in the order of the batch."""
        indices = self.indices if len(self.indices) == len(self.losses) else [None] * len(self.losses)
        return [Sample(*fields) for fields in zip(indices, self.losses, range(len(indices)), strict=True)]

    def wrap_handler(self, handler: Handler, owner: Hooks, event: Event) -> Handler:
        if not isinstance(owner, Algorithm) or event not in OF_BATCH:
            return handler

        @functools.wraps(handler)
        def recorded(state: State, logger: Logger) -> None:
            if not self._is_now(state, event):
                handler(state, logger)
                return
            before = _describe(state, owner)
            rows = _rows(state) if owner.picks_samples and event is Event.AFTER_DATALOADER else None
            if event is Event.AFTER_DATALOADER and not self.indices:
                self.indices = _indices(state)
            handler(state, logger)
            if rows is not None:
                self._follow(rows, _rows(state))
            if changed := _changes(before, _describe(state, owner)):
                self.acts.append(Act(owner.config_key, event.name, changed))

        return recorded

    def init(self, state: State, logger: Logger) -> None:
        self.state = state

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self._is_now(state) and not self.indices:
            self.indices = _indices(state)

    def before_forward(self, state: State, logger: Logger) -> None:
        if not self._is_now(state):
            return
        if not self.microbatches:
            self.epoch = state.timestamp.epoch
            self.rates = [group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups]
            self._watch_modules(state.unwrapped_model)
            if self.debug:
                breakpoint()  # `state` holds everything; step into the forward pass, or continue with `c`
        self.microbatches.append(_copied(state.microbatch))

    def after_forward(self, state: State, logger: Logger) -> None:
        if self._is_now(state):
            self._release()
            self.outputs.append(_copied(state.outputs))

    def before_loss(self, state: State, logger: Logger) -> None:
        if self._is_now(state) and not self.no_losses:
            try:
                self.losses += _losses(state)
            except Exception as error:
                self.no_losses = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.losses = []

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._is_now(state):
            self._release()
            self.loss = float(state.total_loss)
            named = state.unwrapped_model.named_parameters()
            gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
            self.gradient_values = {name: whole(grad.detach()).to("cpu", copy=True) for name, grad in gradients.items()}
            self.gradients = {name: float(gradient.double().norm()) for name, gradient in self.gradient_values.items()}
            if not self.outputs:
                self.no_losses = "the model has its own training_step"

    def batch_end(self, state: State, logger: Logger) -> None:
        self.is_done = self.is_done or state.timestamp.batch == self.batch

    def _is_now(self, state: State, event: Event | None = None) -> bool:
        ended = event is Event.BATCH_END
        if state.timestamp.batch + (not ended) != self.batch:
            return False
        return get_global_rank() == 0 or is_sharded(state.unwrapped_model)  # all ranks gather sharded weights

    def _watch_modules(self, model: nn.Module) -> None:
        if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
            return

        def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.activations.setdefault(name, float(output.detach().float().norm()))

        for name, module in model.named_modules():
            if name:
                self._hooks.append(module.register_forward_hook(functools.partial(note, name)))

    def _release(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _follow(self, before: list[str], after: list[str]) -> None:
        """Identify the samples that an algorithm has kept, by their content."""
        positions: dict[str, list[int]] = {}
        for position, row in enumerate(before):
            positions.setdefault(row, []).append(position)
        kept = [positions[row].pop(0) if positions.get(row) else None for row in after]
        is_known = len(self.indices) == len(before)
        self.indices = [self.indices[position] if is_known and position is not None else None for position in kept]


def _describe(state: State, owner: Algorithm) -> dict[str, Any]:
    """Return a digest and a short description of everything an algorithm may change, by name."""
    descriptions: dict[str, tuple[str, str]] = {}
    values = {name: getattr(state, name, None) for name in ("batch", "microbatch", "outputs", "loss")}
    for name, value in values.items():
        if value is not None:
            with suppress(TypeError):  # some objects have no digest
                descriptions[name] = digest(value), _shape(value)
    named = dict(state.unwrapped_model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    descriptions["gradients"] = digest(gradients), f"norm {norm(gradients.values()):.4g}"
    descriptions["weights"] = digest(dict(state.unwrapped_model.state_dict())), f"norm {norm(named.values()):.6g}"
    rates = [float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups]
    descriptions["learning rates"] = digest(rates), ", ".join(f"{rate:.4g}" for rate in rates)
    with suppress(TypeError):
        descriptions["its own state"] = digest(owner.state_dict()), ""
    return descriptions


def _changes(before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]) -> list[str]:
    texts = []
    for name, (new_digest, new_text) in after.items():
        old_digest, old_text = before.get(name, ("", ""))
        if new_digest != old_digest:
            texts.append(f"{name} {old_text} -> {new_text}" if old_text and new_text != old_text else name)
    return texts


def _shape(value: Any) -> str:
    shapes: list[str] = []
    with suppress(TypeError):
        map_tensors(value, lambda tensor: shapes.append(str(tuple(tensor.shape))) or tensor)
    return " ".join(shapes[:1])


def _indices(state: State) -> list[int | None]:
    """Return the data set indices of this rank's share of the batch; empty if the loader does not know them."""
    order: Any = getattr(state.train_dataloader, "order", None)
    now = state.timestamp
    return order.indices(now.epoch, now.batch_in_epoch).tolist() if hasattr(order, "indices") else []


def _rows(state: State) -> list[str]:
    return [digest(sample) for sample in _one_by_one(state, state.batch)]


def _one_by_one(state: State, batch: Any) -> list[Any]:
    model = state.unwrapped_model
    return [sample for _, sample in split(batch, model.num_samples(batch), model.slice_batch, size=1)]


@torch.no_grad()
def _losses(state: State) -> list[float]:
    """Return the loss of each sample of the microbatch, from what the loss function is about to see."""
    model = state.unwrapped_model

    def measure() -> list[float]:
        try:
            return sample_losses(model, state.outputs, state.microbatch).tolist()
        except Exception:  # vmap supports neither a loss that reads values nor a batch of lists
            losses = []
            for row, sample in enumerate(_one_by_one(state, state.microbatch)):
                output = map_tensors(state.outputs, lambda tensor, row=row: tensor[row : row + 1])
                losses.append(float(total_of(model.loss(output, sample))))
            return losses

    with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []):
        return state.precision.autocast(state.device)(measure)()


def _copied(value: Any) -> Any:
    with suppress(TypeError):
        return map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))
    return None
