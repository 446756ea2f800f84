"""Activation checkpointing: activations of some modules are discarded, and recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import LAYER_SURGERY, report
from runner.distributed.blocks import find_repeated
from runner.failures.errors import wrong_argument


def find_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the outermost modules whose name or class matches a pattern, by name.

    Args:
        model: model to search; it is never part of the result itself.
        patterns: shell patterns with * and ?; * also matches dots.
    """
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        matches = any(fnmatchcase(text, pattern) for pattern in patterns for text in (name, type(module).__name__))
        if name and matches and not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost


def forget_activations(module: nn.Module) -> None:
    """Make a module recompute activations in the backward pass instead of storing them; weights keep their names."""
    forward = module.forward
    contexts = partial(_contexts, module)

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # compiled code recomputes values, but updates buffers only once
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = checkpointed_forward


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _buffers_kept(module)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Replace buffers with copies within the context, because running statistics must not see a batch twice."""
    owners = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    for owner, name, buffer in owners:
        owner._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in owners:
            owner._buffers[name] = buffer


class ActivationCheckpointing(Algorithm):
    """Stores only the inputs of some modules for the backward pass: saves memory, takes about a third more time.

    A backward pass costs about two forward passes, and recomputing adds one more. Gradients, running statistics and
    dropout masks are bit-identical. Evaluation does not change.

    Args:
        modules: pattern, or list of patterns, with * and ? for names or classes of modules, such as '*Block' or
            'module.blocks.?'; of nested modules, the outermost one is used. None: the model's repeated blocks.
        allow_no_match: whether to accept patterns that match no module, and a model left unchanged.

    Raises:
        ValueError: at INIT, the model has no such module, or a pattern matches none.

    Evidence:
        Strong for memory: with blocks of equal size, it falls to that of one block and the inputs of all blocks (Chen
        et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174). The trained model is the same.
    """

    runs_after = (*LAYER_SURGERY, "StochasticDepth")

    def __init__(self, modules: str | Sequence[str] | None = None, allow_no_match: bool = False) -> None:
        self.modules = [modules] if isinstance(modules, str) else modules
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        model = state.unwrapped_model
        modules = find_repeated(model) if self.modules is None else find_modules(model, self.modules)
        unmatched = [pattern for pattern in self.modules or () if not find_modules(model, [pattern])]
        if modules and unmatched and not self.allow_no_match:
            raise wrong_argument(
                "modules", self.modules, f"{', '.join(map(repr, unmatched))} matches no module; leave it out"
            )
        for module in set(modules.values()):
            forget_activations(module)
        target = "repeated block" if self.modules is None else f"module like {' or '.join(map(repr, self.modules))}"
        report(self, state, [*modules], target, self.allow_no_match)
