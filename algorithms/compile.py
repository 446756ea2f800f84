"""Compile: repeated blocks of the model are compiled one by one, which takes a fraction of compiling the whole."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import report

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Those that replay CUDA graphs."""


def find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with parts whose class occurs at least twice in a model, by name.

    Modules that only hold one other, and torch's own containers, are looked into instead.
    """
    parents = [one for one in model.modules() if _is_block(one)]
    counts = Counter(map(type, parents))

    def search(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if _is_block(module) and counts[type(module)] > 1:
            yield name, module
            return
        for key, child in module.named_children():
            yield from search(child, f"{name}.{key}" if name else key)

    return dict(search(model, ""))


def _is_block(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    wraps = len(module._modules) == 1 and not module._parameters
    return bool(module._modules) and not wraps and not isinstance(module, containers)


class Compile(Algorithm):
    """Compiles the model with `torch.compile`, after all other changes of it; names of weights stay.

    Blocks of one class and shape share their compiled code. Compilation happens in the first batches, again in the
    first evaluation, and again for a batch of another shape. Results differ from those without it by rounding, and code
    for a shape may round otherwise after other shapes than alone: where shapes vary, results depend on those that came
    before, and a resumed run equals the whole one up to rounding only.

    CUDA graphs use the same memory in each forward pass: what the compiled parts returned is gone at the next one.

    Args:
        mode: 'default', 'reduce-overhead' and 'max-autotune' (on GPUs with CUDA graphs), or
            'max-autotune-no-cudagraphs'.
        regional: compile the blocks that the model repeats, one by one; otherwise the model as a whole, as the
            Trainer's `compile` does.

    Raises:
        ValueError: an unknown mode; after loading, no block is repeated, a CPU run has no C++ compiler, or gradients of
            several microbatches would have to be kept in the memory of CUDA graphs.

    Evidence:
        Strong for speed on GPUs, where a whole model of equal blocks takes several times as long to compile; on a CPU
        a small gain that takes minutes of training to pay; the model that is trained is the same.
    """

    runs_after = ("EMA", "LAWA", "SWA", "ScheduleFree")  # surgery comes at INIT, which is before in any case

    def __init__(self, mode: str = "default", regional: bool = True) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
        self.mode = mode
        self.regional = regional
        self._replays = False  # CUDA graphs

    def after_load(self, state: State, logger: Logger) -> None:
        compiler = os.environ.get("CXX", "clang++" if os.uname().sysname == "Darwin" else "g++")
        if state.device.type == "cpu" and not shutil.which(compiler):
            raise ValueError(
                f"Compile needs a C++ compiler for the CPU, and {compiler!r} is not here: install one, or set CXX"
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
        for module in found.values():
            module.compile(mode=self.mode)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._replays:
            # By itself torch takes each compiled block of an evaluation for a new pass, and frees its own input.
            torch.compiler.cudagraph_mark_step_begin()

    eval_before_forward = predict_before_forward = before_forward
