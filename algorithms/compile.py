"""Compile: `torch.compile` for the blocks of a model, the whole model, or a whole training step."""

from __future__ import annotations

import inspect
import os
import shutil
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import report
from runner.algorithms._whole_step import check_can_join, join_loss
from runner.distributed.blocks import find_repeated
from runner.failures.checks import check_one_of
from runner.failures.errors import wrong_argument

SCOPES = ("block", "model", "step")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs."""
RECOMPILES = 8
"""Limit of recompilations per block, torch's default; different shapes, training and evaluation each count."""
TINY = torch.finfo(torch.float32).tiny
"""Replaces a rate of 0, because Adam divides by the rate if it is a tensor."""


def compile_optimizer(optimizer: Optimizer, mode: str) -> None:
    """Compile the step of an optimizer, unless it is a single fused kernel, which torch does not compile.

    If Muon steps its non-matrix parameters by a fused kernel, only the matrix update is compiled. Learning rates reach
    the compiled step as tensors, so that new rates cause no recompilation; outside of it they stay numbers.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if group.get("foreach"):
            group["foreach"] = None  # torch decides: compiling fuses anyway, and some foreach kernels take no tensor lr
    plain: Any = type(optimizer).step
    compiled = torch.compile(plain.__wrapped__, mode=mode)  # without the wrapper that calls hooks: see below
    tensors: dict[int, Tensor] = {}

    @wraps(optimizer.step)  # keeps the mark that torch's schedulers put on it
    def step(self: Any) -> None:
        self._opt_called = True
        rates = [group["lr"] for group in self.param_groups]
        for index, (group, rate) in enumerate(zip(self.param_groups, rates, strict=True)):
            if not isinstance(rate, Tensor):
                if index not in tensors:
                    first = group["params"][0]
                    dtype = torch.promote_types(first.dtype, torch.float32)
                    tensors[index] = torch.empty((), dtype=dtype, device=first.device)
                group["lr"] = tensors[index].fill_(rate or TINY)
        try:
            compiled(self)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)


class Compile(Algorithm):
    """Compiles the model with `torch.compile`, after all other changes to it; weights keep their names.

    Blocks of the same class and shape share their compiled code. Compilation happens in the first batch; in the first
    batch of another size, this time for any size; in the first evaluation; and, for SGD with momentum, in its second
    step.
    Results differ only by rounding from those without compilation. The rounding for one shape may depend on earlier
    shapes, so if shapes vary, a resumed run equals an uninterrupted one only up to rounding.

    CUDA graphs reuse the same memory in each forward pass, so the next pass overwrites the outputs of compiled parts.

    Args:
        mode: mode of `torch.compile`: 'default', 'reduce-overhead' or 'max-autotune' (both with CUDA graphs on GPUs),
            or 'max-autotune-no-cudagraphs'.
        scope: 'block': each of the model's repeated blocks; 'model': the model as a whole, as with the Trainer's
            `compile`; 'step': the model together with its loss, and the steps of the optimizers.

    Raises:
        ValueError: the mode or the scope is unknown; or, after loading, the model has no repeated block, there is no
            C++ compiler for the CPU, or CUDA graphs, which overwrite gradients, are combined with gradient
            accumulation; or, with 'step', the model is sharded or has its own `training_step`, or another
            algorithm acts between the forward pass and the loss; or, when training starts, the Trainer's `compile` has
            compiled the model again.

    Evidence:
        Strong for speed on GPUs. Compiling a model of equal blocks as a whole takes several times as long. On a CPU the
        gain is small and pays off only after minutes of training. The trained model is the same.
    """

    runs_after = ("EMA", "LAWA", "SWA", "ScheduleFree")  # surgery runs at INIT, which always comes earlier

    def __init__(self, mode: str = "default", scope: str = "block") -> None:
        check_one_of("mode", mode, MODES)
        check_one_of("scope", scope, SCOPES)
        self.mode = mode
        self.scope = scope
        self._replays = False  # whether CUDA graphs are replayed
        self._compiled: dict[Module, Any] = {}  # the compiled call of the model and of each part

    def after_load(self, state: State, logger: Logger) -> None:
        compiler = os.environ.get("CXX", "clang++" if os.uname().sysname == "Darwin" else "g++")
        if state.device.type == "cpu" and not shutil.which(compiler):
            raise ValueError(
                f"Compile needs a C++ compiler for the CPU, and {compiler!r} is not installed: install one, or set CXX"
            )
        self._replays = state.device.type == "cuda" and self.mode in WITH_GRAPHS
        if self._replays and (state.grad_accum > 1 or state.microbatch_size):
            raise wrong_argument(
                "mode",
                self.mode,
                "CUDA graphs cannot accumulate gradients; use mode='default', or train whole batches, with "
                "grad_accum=1 and microbatch_size=None",
            )
        model = state.unwrapped_model
        modules = find_repeated(model) if self.scope == "block" else {"": model}
        if not modules:
            raise ValueError("scope='block': the model has no repeated block; set scope='model' to compile all of it")
        if self.scope == "step":
            self._join(state)
        elif self.scope == "block":
            report(self, state, [*modules], "block")
        # Blocks of one class share a limit, beyond which torch runs them uncompiled. The key exists since torch 2.13.
        has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
        limit = {"recompile_limit": RECOMPILES * len(modules)} if has_limit else {}
        for module in modules.values():
            module.compile(mode=self.mode, **limit)
        self._compiled = {module: module._compiled_call_impl for module in (model, *modules.values())}

    def fit_start(self, state: State, logger: Logger) -> None:
        if any(module._compiled_call_impl is not call for module, call in self._compiled.items()):
            raise ValueError("Compile already compiles the model, in its own mode: leave out the Trainer's compile")

    def _join(self, state: State) -> None:
        """Compile the loss with the model, and the steps of the optimizers."""
        check_can_join(state, "scope='step'", "use scope='model' or 'block'")
        join_loss(state.unwrapped_model)
        for optimizer in state.optimizers:
            # Without CUDA graphs, because gradients are not at the addresses that a graph would read.
            compile_optimizer(optimizer, "default" if self._replays else self.mode)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._replays:
            # Otherwise each compiled block of an evaluation counts as a new pass, and torch frees the block's input.
            torch.compiler.cudagraph_mark_step_begin()

    eval_before_forward = predict_before_forward = before_forward
