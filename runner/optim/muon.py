"""Muon: momentum with equalized singular values for matrices, and AdamW or SGD for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.distributed.sharding import like, whole
from runner.failures.checks import check_list, check_number, check_numbers, check_one_of, check_whole, refuse_if
from runner.optim.param_groups import is_steppable

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0, so that small singular values grow in few steps
RESTS = ("adamw", "sgd")


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Return each matrix U S V^T as U S' V^T, where S' is near 1: between about 0.7 and 1.2 after five steps.

    Each Newton-Schulz step takes the singular values, first scaled to at most 1, through the odd polynomial
    a s + b s^3 + c s^5, by matrix products alone.

    Args:
        matrices: (K, M, N), in the type to compute in.
        steps: number of Newton-Schulz steps.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def split_parameters(model: nn.Module, exclude: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of a model for Muon, and all other parameters that an optimizer can step.

    Matrices have two or more dimensions (convolutions count as (out, in * height * width)), at least two rows and
    columns, are not complex, and are no embedding, whose rows are looked up. `exclude` are shell patterns; a parameter
    whose full name matches one counts as no matrix.
    """
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    looked_up = {id(parameter) for one in embeddings for parameter in one.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and min(_shape(parameter)) >= 2 and not parameter.is_complex()
        is_left_out = id(parameter) in looked_up or any(fnmatchcase(name, pattern) for pattern in exclude)
        if is_steppable(parameter):
            (matrices if is_matrix and not is_left_out else others).append(parameter)
    return matrices, others


class Muon(Optimizer):
    """Steps matrices by their orthogonalized Nesterov momentum, and all other parameters by AdamW or SGD.

    All singular values of a step are about equal, so that rare directions learn as fast as frequent ones. A matrix of
    (M, N) is stepped by `lr * max(1, M / N) ** 0.5`. Group 0 has the matrices, group 1 everything else, each with its
    own rate; schedules multiply both rates, and rules of `ParamGroups` split both groups. `torch.optim.Muon` does the
    same for parameters of two dimensions, but accepts no others. Products are computed in bfloat16 on CUDA, in the
    weights' type, at least float32, elsewhere.

    All ranks of a replicated model make the same step. Of sharded weights, each rank gathers the matrices of one
    shape at a time, computes the same step for all, and keeps its shard.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, for the weight decay.

    Args:
        model: the model to optimize; its names and modules distinguish matrices from the rest.
        lr: learning rate of matrices, at least 0; a step's root mean square is about `lr / min(M, N) ** 0.5`.
        momentum: fraction of the mean gradient that is kept, in [0, 1).
        ns_steps: Newton-Schulz steps, at least 1.
        weight_decay: decoupled weight decay of matrices: each step subtracts `lr * weight_decay` times the weights.
        exclude: shell patterns of names of parameters that are left to `rest`, such as output layers.
        rest: 'adamw' or 'sgd' (with Nesterov momentum).
        rest_lr: learning rate of the rest, at least 0.
        rest_betas: decay of the means of gradients and of their squares in 'adamw', in [0, 1).
        rest_momentum: fraction of the last step that 'sgd' keeps, above 0.
        rest_weight_decay: weight decay of the rest: decoupled with 'adamw', an L2 penalty with 'sgd'.
        fused: whether one kernel steps the whole rest; None: on CUDA, where it can.

    Raises:
        ValueError: an argument is out of range, or there is no matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        exclude: Sequence[str] = ("*head*", "*classifier*", "*.fc.*", "*embed*"),
        rest: str = "adamw",
        rest_lr: float = 3e-3,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_momentum: float = 0.9,
        rest_weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        check_numbers("[0, inf]", lr=lr, weight_decay=weight_decay, rest_lr=rest_lr)
        check_number("momentum", momentum, "[0, 1)")
        check_whole("ns_steps", ns_steps, 1)
        check_list("exclude", exclude, "patterns")
        check_one_of("rest", rest, RESTS)
        matrices, others = split_parameters(model, exclude)
        refuse_if(not matrices, "exclude", [*exclude], f"leaves no matrix to Muon; exclude less, or use only {rest!r}")
        group = {"lr": lr, "momentum": momentum, "ns_steps": ns_steps, "weight_decay": weight_decay}
        super().__init__([{"params": matrices, **group}], {})
        self._rest: Optimizer | None = None
        if others and rest == "adamw":
            self._rest = torch.optim.AdamW(others, rest_lr, rest_betas, weight_decay=rest_weight_decay, fused=fused)
        elif others:
            options: dict[str, Any] = {"weight_decay": rest_weight_decay, "nesterov": True, "fused": fused}
            self._rest = torch.optim.SGD(others, rest_lr, rest_momentum, **options)
        if self._rest is not None:
            for one in self._rest.param_groups:
                self.add_param_group(one)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy needs."""
        return {**super().__getstate__(), "_rest": self._rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes, as copies and `load_state_dict` do, and share the state with the rest."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let the optimizer of the rest work on this optimizer's state and its own groups here."""
        if self._rest is not None:
            self._rest.state = self.state
            self._rest.param_groups = [group for group in self.param_groups if "ns_steps" not in group]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step all parameters that have a gradient; return the value of `closure`, which is called first if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if "ns_steps" in group:
                self._step_matrices(group)
        if self._rest is not None:
            self._rest.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        parameters: list[Any] = [one for one in group["params"] if one.grad is not None]
        if not parameters:
            return
        gradients = [one.grad for one in parameters]
        for one in parameters:
            if "momentum_buffer" not in self.state[one]:
                self.state[one]["momentum_buffer"] = torch.zeros_like(one)
        buffers = [self.state[one]["momentum_buffer"] for one in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        if group["weight_decay"]:
            factor = 1 - group["lr"] * group["weight_decay"]
            torch._foreach_mul_(parameters, factor)  # pyright: ignore[reportPrivateImportUsage]
        alike: dict[tuple[int, int], list[int]] = {}
        for index, one in enumerate(parameters):
            alike.setdefault(_shape(one), []).append(index)
        for (rows, columns), indices in alike.items():
            stacked = torch.stack([whole(updates[index]).flatten(1) for index in indices])
            steps = orthogonalize(stacked.to(_working_dtype(stacked)), group["ns_steps"])
            scale = -group["lr"] * max(1.0, rows / columns) ** 0.5
            for index, step in zip(indices, steps, strict=True):
                one = parameters[index]
                one.add_(like(step.view(one.shape).to(one.dtype), one), alpha=scale)


def _shape(parameter: Tensor) -> tuple[int, int]:
    """Return rows and columns of a parameter taken as a matrix."""
    rows = parameter.shape[0]
    return rows, parameter.numel() // max(1, rows)


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_cuda else torch.promote_types(tensor.dtype, torch.float32)
