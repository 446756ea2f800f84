"""SAM: sharpness-aware minimization, which takes gradients where the loss is highest nearby."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from runner import Algorithm, Event, Logger, State
from runner.algorithms._averaging import copy_all
from runner.algorithms._snapshot import KeptBuffers
from runner.distributed.sharding import is_sharded
from runner.failures.checks import check_numbers, check_whole
from runner.models.loss import Share
from runner.training.run import Accumulate, Run


@torch.no_grad()
def ascend(weights: Sequence[Tensor], gradients: Sequence[Tensor], rho: float, epsilon: float) -> None:
    """Add rho g / (norm(g) + epsilon) to weights, in place: a step of length rho up the gradient.

    To first order, loss(w + e) is loss(w) plus the dot product of e and g. Of all steps e of length rho, the step in
    the direction of g makes it largest (Cauchy-Schwarz).

    Args:
        weights: weights to change.
        gradients: gradients g of the same shapes; the norm is taken over all of them together.
        rho: length of the step.
        epsilon: small number that avoids a division by 0 if the gradient is 0.
    """
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()  # type: ignore
    steps = torch._foreach_mul(list(gradients), rho / (norm + epsilon))  # type: ignore
    torch._foreach_add_(list(weights), steps)  # type: ignore


class SAM(Algorithm):
    """Takes each gradient not at the weights, but at a point one step of length `rho` up the gradient from there.

    SAM minimizes the highest loss within the distance rho of the weights w, so that it finds flat minima. To first
    order, the loss is highest at w + e with e from `ascend`. Its gradient is taken as that of the loss at w + e: the
    dependence of e on w, which needs second derivatives, is left out (Foret et al. 2021).

    Before a batch is trained, an extra pass computes the gradient of this rank's batch. It is not exchanged with other
    ranks: as in the paper, each rank climbs by the gradient of its own samples, so results depend on the number of
    ranks. Training then computes its gradients at the new point, averaged over all ranks, and the weights are restored
    right away. Algorithms act in both passes, callbacks only in the second, and dropout draws the same masks in both.
    Running statistics see only the first pass, at the weights; training loss and metrics are those of the second. A
    batch takes twice the time, and memory for a copy of the weights and of the gradients.

    Args:
        rho: length of the step, above 0.
        epsilon: number added to the gradient's norm, above 0.
        interval: how often SAM is used, in batches, at least 1; the batches in between are trained as usual.

    Raises:
        ValueError: an argument is out of range, or the model is sharded; or, when training starts, the run uses
            amp_fp16, whose scaler cannot handle the extra pass, several optimizers, a model with its own
            `training_step`, or microbatch_size='auto'.

    Evidence:
        Strong for image classification at twice the cost (Foret et al. 2021, arXiv:2010.01412); none at equal cost.
    """

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        check_numbers("(0, inf]", rho=rho, epsilon=epsilon)
        check_whole("interval", interval, 1)
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval

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
        self._buffers = KeptBuffers(state.unwrapped_model)

    def wrap_accumulate(self, accumulate: Accumulate) -> Accumulate:
        def accumulate_uphill(run: Run, share: Share) -> None:
            if run.state.timestamp.batch % self.interval:
                accumulate(run, share)
                return
            gradients = self._gradients(run, accumulate)  # at the weights w; also updates running statistics
            weights = list(gradients)
            original = [weight.detach().clone() for weight in weights]
            self._buffers.keep()
            run.state.is_consistent = False
            ascend(weights, list(gradients.values()), self.rho, self.epsilon)  # to w + e
            accumulate(run, share)  # the gradient at w + e, for the optimizer
            copy_all(weights, original)  # back to w
            self._buffers.put_back()

        return accumulate_uphill

    def _gradients(self, run: Run, accumulate: Accumulate) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of this rank's batch, dense. `.grad` stays unchanged, and only algorithms see events."""
        state = run.state
        parameters = [parameter for parameter in run.parameters if parameter.requires_grad]
        total: dict[nn.Parameter, Tensor] = {}

        def backward(loss: Tensor, gradient: Tensor) -> None:
            # Not `loss.backward`, which would make DDP average the gradients over ranks.
            parts = torch.autograd.grad(loss, parameters, gradient, allow_unused=True)  # of this microbatch
            for parameter, part in zip(parameters, parts, strict=True):
                if part is not None:
                    total[parameter] = total[parameter] + part if parameter in total else part

        fire = partial(run.engine.run_event, hooks=[algorithm.config_key for algorithm in state.algorithms])
        extra = copy.copy(run)
        extra.on = SimpleNamespace(
            before_forward=partial(fire, Event.BEFORE_FORWARD),
            after_forward=partial(fire, Event.AFTER_FORWARD),
            before_loss=partial(fire, Event.BEFORE_LOSS),
            after_loss=partial(fire, Event.AFTER_LOSS),
            before_backward=lambda: None,
            after_backward=lambda: None,
        )
        extra.forward = state.precision.autocast(state.device)(state.unwrapped_model)
        extra.backward = backward
        extra.loss_is_checked = True  # the second pass checks it
        accumulate(extra, lambda: 1.0)  # this rank's batch alone
        return {parameter: total[parameter].to_dense() for parameter in parameters if parameter in total}
