"""Compile: repeated blocks of a model are compiled one by one, in a fraction of the time that the whole would take."""

from __future__ import annotations

import inspect
import os
import shutil

import torch

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import report
from runner.distributed.blocks import find_repeated

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs."""
RECOMPILES = 8
"""Of a block: torch's own limit for a function, which counts shapes, training, evaluation and the like."""


class Compile(Algorithm):
    """Compiles the model with `torch.compile`, after all other changes to it; names of weights stay.

    Blocks of the same class and shape share their compiled code. Compilation happens in the first batch, again in the
    first batch of another size, for any size, and again in the first evaluation; then no more. Results differ only by
    rounding from those without compilation. The rounding for one shape may depend on which shapes came before, so where
    shapes vary, a resumed run equals an uninterrupted one only up to rounding.

    CUDA graphs reuse the same memory in each forward pass, so what compiled parts returned is overwritten by the next
    pass.

    Args:
        mode: mode of `torch.compile`: 'default', 'reduce-overhead' or 'max-autotune' (both with CUDA graphs on GPUs),
            or 'max-autotune-no-cudagraphs'.
        regional: whether to compile the blocks that the model repeats, one by one; otherwise the model is compiled as a
            whole, as with the Trainer's `compile`.

    Raises:
        ValueError: the mode is unknown; or, after loading, the model repeats no block, there is no C++ compiler for the
            CPU, or CUDA graphs are combined with gradient accumulation, for which they cannot keep gradients in memory.

    Evidence:
        Strong for speed on GPUs, where a model of equal blocks takes several times as long to compile as a whole. On a
        CPU the gain is small and pays off only after minutes of training. The trained model is the same.
    """

    runs_after = ("EMA", "LAWA", "SWA", "ScheduleFree")  # surgery runs at INIT, which always comes earlier

    def __init__(self, mode: str = "default", regional: bool = True) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
        self.mode = mode
        self.regional = regional
        self._replays = False  # whether CUDA graphs are replayed

    def after_load(self, state: State, logger: Logger) -> None:
        compiler = os.environ.get("CXX", "clang++" if os.uname().sysname == "Darwin" else "g++")
        if state.device.type == "cpu" and not shutil.which(compiler):
            raise ValueError(
                f"Compile needs a C++ compiler for the CPU, and {compiler!r} is not installed: install one, or set CXX"
            )
        self._replays = state.device.type == "cuda" and self.mode in WITH_GRAPHS
        if self._replays and (state.grad_accum > 1 or state.microbatch_size):
            raise ValueError(
                f"mode={self.mode!r}: CUDA graphs cannot accumulate gradients; use mode='default', or train whole "
                "batches, with grad_accum=1 and microbatch_size=None"
            )
        model = state.unwrapped_model
        found = find_repeated(model) if self.regional else {"": model}
        if not found:
            raise ValueError("regional=True: the model repeats no block; set regional=False to compile it as a whole")
        report(self, state, [*found], "block")
        # Blocks of one class share a limit, after which torch runs all further ones uncompiled; a key since torch 2.13.
        has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
        limit = {"recompile_limit": RECOMPILES * len(found)} if has_limit else {}
        for module in found.values():
            module.compile(mode=self.mode, **limit)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._replays:
            # Otherwise torch takes each compiled block of an evaluation for a new pass, and frees that block's input.
            torch.compiler.cudagraph_mark_step_begin()

    eval_before_forward = predict_before_forward = before_forward
