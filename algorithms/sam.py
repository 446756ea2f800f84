"""SAM: sharpness-aware minimization, which takes gradients where the loss is highest nearby."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner import Algorithm, Event, Logger, State
from runner.algorithms._averaging import copy_all
from runner.algorithms._snapshot import KeptBuffers
from runner.core.engine import overrides
from runner.core.randomness import ForwardStream
from runner.device.batch import split
from runner.distributed.sharding import is_sharded
from runner.failures.checks import check_numbers, check_whole
from runner.models.loss import fractions, root_gradient, total_of


@torch.no_grad()
def ascend(weights: Sequence[Tensor], gradients: Sequence[Tensor], rho: float, epsilon: float) -> None:
    """Add rho g / (norm(g) + epsilon) to weights, in place: a step of length rho up the gradient.

    Args:
        weights: weights to change.
        gradients: gradients g of the same shapes; the norm is taken over all of them together.
        rho: length of the step.
        epsilon: small number that avoids a division by 0 where the gradient is 0.
    """
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()  # type: ignore
    steps = torch._foreach_mul(list(gradients), rho / (norm + epsilon))  # type: ignore
    torch._foreach_add_(list(weights), steps)  # type: ignore


class SAM(Algorithm):
    """Takes each gradient not at the weights, but at a point one step of length `rho` up the gradient from there.

    Before a batch is trained, an extra pass computes the gradient of this rank's batch. It is not exchanged with other
    ranks: as in the paper, each rank climbs by the gradient of its own samples, so results depend on the number of
    ranks. Training then computes its gradients at the new point, averaged over all ranks, and the weights are restored
    before the optimizer steps. Algorithms act in both passes, and dropout draws the same masks in both. Running
    statistics see only the first pass, at the weights; training loss and metrics are those of the second. A batch takes
    twice the time, plus memory for a copy of the weights and of the gradients.

    Args:
        rho: length of the step, above 0.
        epsilon: number added to the gradient's norm, above 0.
        interval: number of batches from one use of SAM to the next, at least 1; batches in between are trained as
            usual.

    Raises:
        ValueError: an argument is out of range, or the model is sharded; or, when training starts, the run uses
            amp_fp16, whose scaler does not know of the extra pass, several optimizers, a model with its own
            `training_step`, or microbatch_size='auto'.

    Evidence:
        Strong for image classification at twice the cost (Foret et al. 2021, arXiv:2010.01412); none at equal cost.
    """

    # Others that act at BEFORE_TRAIN_BATCH come first. AFTER_TRAIN_BATCH runs in reverse order, so the weights are
    # restored before others look at them.
    runs_after = ("CutMix", "GradientClipping", "LayerFreezing", "MixUp", "NaNGuard", "SWA", "ScheduleFree")

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        check_numbers("(0, inf]", rho=rho, epsilon=epsilon)
        check_whole("interval", interval, 1)
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval
        self._kept: list[tuple[Tensor, Tensor]] = []

    def before_load(self, state: State, logger: Logger) -> None:
        if is_sharded(state.unwrapped_model):
            reason = "it needs each rank's own full gradient"
            raise ValueError(f"SAM cannot be used with a sharded model: {reason}; leave it out")

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.scaler is not None:
            raise ValueError("precision='amp_fp16': its loss scaler cannot handle SAM's extra pass; use 'amp_bf16'")
        if len(state.optimizers) != 1 or state.unwrapped_model.training_step is not None:
            raise ValueError("SAM needs exactly one optimizer, and a model without its own training_step: remove SAM")
        if state.microbatch_size == "auto":
            raise ValueError(
                "microbatch_size='auto': SAM's extra pass cannot be split further when memory runs out; "
                "give a number of samples"
            )
        for one in state.algorithms[state.algorithms.index(self) + 1 :]:
            if overrides(one, Event.BEFORE_TRAIN_BATCH):
                raise ValueError(
                    f"SAM must come after {type(one).__name__}, which also acts before each batch: list SAM last"
                )
        self._buffers = KeptBuffers(state.unwrapped_model)
        self._stream = ForwardStream(state.seed, state.device)
        self._roots: dict[float, Tensor] = {}

    def before_train_batch(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch % self.interval:
            return
        parameters = [one for one in state.unwrapped_model.parameters() if one.requires_grad]
        found = self._gradients(state, logger, parameters)
        dense = (gradient if gradient is None else gradient.to_dense() for gradient in found)
        climbing = [(one, gradient) for one, gradient in zip(parameters, dense, strict=True) if gradient is not None]
        self._buffers.keep()
        self._kept = [(one, one.detach().clone()) for one, _ in climbing]
        state.is_consistent = False
        ascend([one for one, _ in climbing], [gradient for _, gradient in climbing], self.rho, self.epsilon)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._kept:
            copy_all([one for one, _ in self._kept], [weights for _, weights in self._kept])
            self._kept = []
            self._buffers.put_back()

    def _gradients(self, state: State, logger: Logger, parameters: list[Any]) -> list[Tensor | None]:
        """Return the gradients of this rank's batch, by microbatches as in training; `.grad` is not touched."""
        model = state.unwrapped_model
        samples = model.num_samples(state.batch)
        size = state.samples_per_microbatch
        microbatches = split(state.batch, samples, model.slice_batch, state.grad_accum, size)
        parts = fractions(model, [microbatch for _, microbatch in microbatches])
        forward = state.precision.autocast(state.device)(model)
        compute_loss = state.precision.autocast(state.device)(model.loss)
        total: list[Tensor | None] = [None for _ in parameters]
        for index, (state.microbatch_start, state.microbatch) in enumerate(microbatches):
            _fire(Event.BEFORE_FORWARD, state, logger)
            self._stream.start(state.timestamp.batch, index)
            state.outputs = forward(state.microbatch)
            _fire(Event.AFTER_FORWARD, state, logger)
            _fire(Event.BEFORE_LOSS, state, logger)
            state.loss = compute_loss(state.outputs, state.microbatch)
            _fire(Event.AFTER_LOSS, state, logger)
            # Not backward(), which would make DDP average the gradients over ranks.
            loss = total_of(state.loss)
            root = root_gradient(loss, parts[index], self._roots)
            gradients = torch.autograd.grad(loss, parameters, root, allow_unused=True)
            total = [_sum(old, new) for old, new in zip(total, gradients, strict=True)]
        return total


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _fire(event: Event, state: State, logger: Logger) -> None:
    """Run an event of the algorithms only, for a pass that callbacks do not see."""
    for one in reversed(state.algorithms) if event.closes_bracket else state.algorithms:
        one.run_event(event, state, logger)
