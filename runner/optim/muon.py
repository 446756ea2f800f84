"""Muon: momentum with equalized singular values for matrices, and AdamW or SGD for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.distributed.sharding import like, whole
from runner.failures.checks import check_list, check_number, check_numbers, check_one_of, check_whole, refuse_if
from runner.optim.param_groups import is_steppable

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # chosen to be steep at 0, so that small singular values grow in few steps
RESTS = ("adamw", "sgd")


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Return each matrix U S V^T as U S' V^T, with all S' near 1: between about 0.7 and 1.2 after five steps.

    Division by the Frobenius norm brings all singular values into [0, 1]. A Newton-Schulz step then replaces X by
    `a X + b (X X^T) X + c (X X^T)^2 X`. For X = U S V^T, X X^T is U S^2 U^T, so U and V stay and each singular value s
    becomes `a s + b s^3 + c s^5`, by matrix products alone. Tall matrices are transposed, so that X X^T is the smaller
    product. Source: Jordan et al. 2024, see `Muon`.

    Args:
        matrices: `(K, M, N)`, in the type to compute in.
        steps: number of Newton-Schulz steps.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def split_parameters(model: nn.Module, exclude: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of a model for Muon, and all other parameters that an optimizer can step.

    Matrices have two or more dimensions (convolutions count as `(out, in * height * width)`), at least two rows and two
    columns, and are not complex. Embeddings do not count, because their rows are looked up, nor do parameters whose
    full name matches one of the shell patterns in `exclude`.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    looked_up = {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}
    matrices: list[nn.Parameter] = []
    remaining: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and min(_matrix_shape(parameter)) >= 2 and not parameter.is_complex()
        is_excluded = id(parameter) in looked_up or any(fnmatchcase(name, pattern) for pattern in exclude)
        if is_steppable(parameter):
            (matrices if is_matrix and not is_excluded else remaining).append(parameter)
    return matrices, remaining


class Muon(Optimizer):
    """Steps matrices by their orthogonalized Nesterov momentum, and all other parameters by AdamW or SGD.

    For a matrix W `(M, N)` with gradient G and momentum m, in [0, 1), one step is

        B <- m B + (1 - m) G            the mean gradient
        U = (1 - m) G + m B             Nesterov: the mean gradient one step ahead
        W <- (1 - lr * weight_decay) W - lr * max(1, M / N) ** 0.5 * orthogonalize(U)

    All min(M, N) singular values of the orthogonalized matrix are about 1, so that rare directions learn as fast as
    frequent ones. Their squares add up to those of the M N entries, whose root mean square is therefore
    `(min(M, N) / (M N)) ** 0.5`, and that of the step is `lr / N ** 0.5` for every shape.

    Group 0 has the matrices, group 1 everything else, each with its own rate; schedules multiply both rates, and rules
    of `ParamGroups` split both groups. `torch.optim.Muon` does the same for parameters of two dimensions, but accepts
    no others. Products are computed in bfloat16 on CUDA, and elsewhere in the weights' dtype, but at least in float32.

    All ranks of a replicated model take the same step. For sharded weights, each rank gathers the matrices of one shape
    at a time, computes the whole step, and applies its shard's part.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, for the weight decay.

    Args:
        model: the model to optimize; its names and modules distinguish matrices from the rest.
        lr: learning rate of matrices, at least 0; the root mean square of a step is about `lr / N ** 0.5`.
        momentum: fraction of the mean gradient that each step keeps, in [0, 1).
        ns_steps: Newton-Schulz steps, at least 1.
        weight_decay: decoupled weight decay of matrices: each step subtracts `lr * weight_decay` times the weights.
        exclude: shell patterns; parameters with such names, for example output layers, are left to `rest`.
        rest: optimizer of everything but matrices: 'adamw' or 'sgd' (with Nesterov momentum).
        rest_lr: learning rate of the rest, at least 0.
        rest_betas: decay of the means of gradients and of their squares in 'adamw', in [0, 1).
        rest_momentum: fraction of the last step that 'sgd' keeps, above 0.
        rest_weight_decay: weight decay of the rest: decoupled with 'adamw', an L2 penalty with 'sgd'.
        fused: whether fused kernels step the rest; None uses them on CUDA if they apply.

    Raises:
        ValueError: an argument is out of range, or the model has no matrix.
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
        matrices, remaining = split_parameters(model, exclude)
        refuse_if(not matrices, "exclude", [*exclude], f"leaves no matrix to Muon; exclude less, or use only {rest!r}")
        group = {"lr": lr, "momentum": momentum, "ns_steps": ns_steps, "weight_decay": weight_decay}
        super().__init__([{"params": matrices, **group}], {})
        self._rest: Optimizer | None = None
        if remaining and rest == "adamw":
            self._rest = torch.optim.AdamW(remaining, rest_lr, rest_betas, weight_decay=rest_weight_decay, fused=fused)
        elif remaining:
            options: dict[str, Any] = {"weight_decay": rest_weight_decay, "nesterov": True, "fused": fused}
            self._rest = torch.optim.SGD(remaining, rest_lr, rest_momentum, **options)
        if self._rest is not None:
            for rest_group in self._rest.param_groups:
                self.add_param_group(rest_group)
        self._share_state()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy needs."""
        return {**super().__getstate__(), "_rest": self._rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copy or of `load_state_dict`, and share the state with the rest."""
        super().__setstate__(state)
        self._share_state()

    def _share_state(self) -> None:
        """Make the rest's optimizer use the state and the non-matrix groups of this optimizer."""
        if self._rest is not None:
            self._rest.state = self.state
            self._rest.param_groups = [group for group in self.param_groups if "ns_steps" not in group]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step all parameters that have a gradient; call `closure` first, if given, and return its value."""
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
        parameters: list[Any] = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        if group["weight_decay"]:
            factor = 1 - group["lr"] * group["weight_decay"]
            torch._foreach_mul_(parameters, factor)  # pyright: ignore[reportPrivateImportUsage]
        indices_by_shape: dict[tuple[int, int], list[int]] = {}
        for index, parameter in enumerate(parameters):
            indices_by_shape.setdefault(_matrix_shape(parameter), []).append(index)
        for (rows, columns), indices in indices_by_shape.items():
            stacked = torch.stack([whole(updates[index]).flatten(1) for index in indices])
            steps = orthogonalize(stacked.to(_working_dtype(stacked)), group["ns_steps"])
            scale = -group["lr"] * max(1.0, rows / columns) ** 0.5
            for index, step in zip(indices, steps, strict=True):
                parameter = parameters[index]
                parameter.add_(like(step.view(parameter.shape).to(parameter.dtype), parameter), alpha=scale)


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a parameter as a matrix: dimension 0, and all others flattened."""
    rows = parameter.shape[0]
    return rows, parameter.numel() // max(1, rows)


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_cuda else torch.promote_types(tensor.dtype, torch.float32)
