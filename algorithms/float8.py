"""Float8: linear layers multiply in 8 bits, by torchao."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

import torch
from torch import nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import LAYER_SURGERY, report
from runner.failures.checks import check_list, check_one_of
from runner.failures.errors import wrong_argument
from runner.libraries.extras import require

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CAPABILITY = (8, 9)  # of the first GPUs that multiply in float8
MULTIPLE = 16  # of features, which such a product needs
HEAD = "*head*"
"""Matches the name of the layer that returns logits in most models. It is not an error if no layer matches."""


def find_linear(model: nn.Module, exclude: Sequence[str]) -> list[str]:
    """Return the names of the linear layers whose sizes are multiples of 16 and whose names match no pattern."""
    return [
        name
        for name, one in model.named_modules()
        if type(one) is nn.Linear
        and one.in_features % MULTIPLE == one.out_features % MULTIPLE == 0
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
    ]


class Float8(Algorithm):
    """Makes linear layers multiply in 8 bits, with scales recomputed each time; needs torchao.

    Inputs, weights and gradients are rounded to float8 for the three products of each layer. Weights and optimizers
    keep their own format, and all else runs as `trainer.precision` says, best amp_bf16. It pays off for large layers
    on GPUs that have such products, and only together with `Compile`, which joins the rounding with what comes before.

    Args:
        recipe: 'tensorwise': one scale for a tensor, the fastest; 'rowwise': one for each row, more precise;
            'rowwise_with_gw_hp': as that, with gradients of weights in their own format, the most precise.
        exclude: shell patterns of the names of layers that stay as they are; the layer that returns logits by default.
        emulate: whether to round in the same way and then multiply as before, which works on any device, and is slow.

    Raises:
        ImportError: the package torchao is not installed.
        ValueError: the recipe is unknown, or `exclude` no list; or, at INIT, the device is no GPU of capability 8.9 or
            more and `emulate` is False, a pattern matches no linear layer, no layer is left that could run in float8,
            or 'rowwise_with_gw_hp' meets autocast on another device than a GPU.

    Evidence: strong for speed in large models (torchao's and torchtitan's benchmarks); losses stay close in them.
    """

    runs_after = LAYER_SURGERY

    def __init__(self, recipe: str = "tensorwise", exclude: Sequence[str] = (HEAD,), emulate: bool = False) -> None:
        check_one_of("recipe", recipe, RECIPES)
        check_list("exclude", exclude, "patterns")
        require("Float8", "float8", "torchao")
        self.recipe = recipe
        self.exclude = exclude
        self.emulate = emulate

    def init(self, state: State, logger: Logger) -> None:
        device = state.device
        capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
        if not (capable or self.emulate):
            where = f"a CUDA device of capability {'.'.join(map(str, CAPABILITY))} or more, not {device}"
            raise ValueError(f"Float8 needs {where}: leave it out, or try it with emulate=True")
        if self.recipe == "rowwise_with_gw_hp" and device.type != "cuda" and state.precision.startswith("amp"):
            raise wrong_argument("recipe", self.recipe, f"torchao ignores autocast on {device}: set precision='fp32'")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

        model = state.unwrapped_model
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        idle = [pattern for pattern in self.exclude if pattern != HEAD and not fnmatch.filter(linear, pattern)]
        if idle:
            raise wrong_argument(
                "exclude",
                self.exclude,
                f"{', '.join(map(repr, idle))} matches no linear layer; there are {', '.join(linear[:8])}"
                f"{', ...' * (len(linear) > 8)}",
            )
        names = find_linear(model, self.exclude)
        report(self, state, names, f"linear layer with sizes that are multiples of {MULTIPLE}")
        # Padded, because the last batch of an epoch may have any size.
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulate, pad_inner_dim=True
        )
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
