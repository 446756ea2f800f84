"""The most memory that training takes, predicted: batches go through the real Trainer as tensors that have none.

Weights and batches are torch's fake tensors. They have a shape, a type and a device, by which torch chooses its
kernels, and so has all that is computed from them; but they have neither values nor memory. What an operation takes for
itself while it runs is not seen.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.batch import map_tensors
from runner.config import build
from runner.distributed.blocks import find_units
from runner.event import Event
from runner.hooks import Callback
from runner.logger import Logger
from runner.modes.checking.live_bytes import LiveBytes
from runner.modes.checking.sizes import Peak, size_of
from runner.precision import Precision
from runner.state import State


def predict_peak(
    config: Mapping[str, Any], model: Any, batch: Any, loader: Any, parts: Mapping[str, Any], ranks: int
) -> Peak:
    """Train two batches without values, and return the memory that they would have taken. No values are computed.

    Args:
        config: the config of the run.
        model: its model, new, on the CPU or the meta device; it loses its values.
        batch: a batch of the size that a rank gets.
        loader: a function from a batch to the loader that yields it once an epoch.
        parts: the run's algorithms and optimizers, new, by the Trainer's arguments.
        ranks: the number of ranks; several have memory for all gradients throughout.

    Raises:
        RuntimeError: the model or an algorithm reads values.
    """
    section = config["trainer"]
    precision = {"tf32": "fp32", "amp_fp16": "amp_bf16"}.get(section.get("precision"), section.get("precision", "fp32"))
    if section.get("gather_dtype") and ranks > 1:
        precision = "bf16"  # weights are gathered, and activations are, in 16 bits
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what fails is an exception, too
    changed = {"device": "cpu", "precision": precision, "compile": False, "load_path": None, "iteration_length": None}
    model.metrics = lambda train: {}
    model.to = lambda *_, **__: model  # it is where it should be, and fake tensors cannot be exchanged in place
    with _OnCPU() as live, tempfile.TemporaryDirectory(prefix="runner-check-") as folder:
        watch = _Watch(live, ranks > 1)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _drop_values(model, Precision(precision).weight_dtype)
            batch = map_tensors(batch, torch.empty_like, objects=lambda one: None if isinstance(one, Mapping) else one)
        trainer = build.assemble(
            {**config, "trainer": {**section, **changed}},
            Path(folder, "run"),
            "check",
            model=model,
            train_dataloader=loader(batch),
            **{**parts, "callbacks": [watch]},
        )
        with trainer:
            trainer.fit()
    total = max(watch.total, live.peak)
    return Peak(total, watch.activations, total - watch.kept, watch.gathered, watch.microbatches)


class _OnCPU(LiveBytes):
    """Counts what oneDNN needs, too: it computes the gradients of a convolution in a layout of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.convolution_backward.default:
            inputs, weight = (0 if one is None else one.nbytes for one in result[:2])
            self.peak = max(self.peak, self.live + 2 * inputs, self.live + weight)
        return result


class _Watch(Callback):
    """Reads the memory that lives, and ends training after two batches: in the second, optimizers have their state."""

    def __init__(self, live: LiveBytes, keeps_gradients: bool) -> None:
        self.live = live
        self.keeps_gradients = keeps_gradients
        self.total = self.activations = self.gathered = self.kept = self.microbatches = self._start = 0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_START:
            self.microbatches = 0
        elif event is Event.BEFORE_FORWARD:
            self.microbatches += 1
            for one in state.unwrapped_model.parameters() if self.keeps_gradients else ():
                if one.requires_grad and one.grad is None:
                    one.grad = torch.zeros_like(one)
            self.total = max(self.total, self.live.peak)
            self.live.peak = self.live.live
            self._start = self.live.live - size_of(state.microbatch)
        elif event in (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD) and self._start:
            # The second of these is the only one that a model with its own training_step has.
            self.activations = max(self.activations, self.live.peak - self._start)
            self._start = 0
        elif event is Event.BATCH_END:
            model = state.unwrapped_model
            states = [one.state_dict() for one in (*state.optimizers, *state.algorithms)]
            self.kept = size_of([dict(model.state_dict()), [one.grad for one in model.parameters()], states])
            self.gathered = _gathered(model)
            if state.timestamp.batch > 1:
                state.stop_training()


def _drop_values(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Make the tensors of a model fake, in place, within the mode; those in several places stay one."""
    made: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        its = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, one in [*its, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(one) not in made:
                kind = dtype if dtype is not None and one.is_floating_point() else one.dtype
                fake = torch.empty_strided(one.shape, one.stride(), dtype=kind, device="cpu")
                made[id(one)] = one, nn.Parameter(fake, one.requires_grad) if isinstance(one, nn.Parameter) else fake
            setattr(module, name, made[id(one)][1])


def _gathered(model: nn.Module) -> int:
    """Return the bytes of what a rank has whole at once of a sharded model: all but the blocks, and two of these."""
    blocks = sorted(size_of([*one.parameters()]) for one in find_units(model).values())
    root = size_of([*model.parameters()]) - sum(blocks)
    return root + sum(blocks[-2:])
