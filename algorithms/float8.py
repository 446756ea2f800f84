"""Float8: linear layers multiply in 8 bits, through torchao."""

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
CAPABILITY = (8, 9)  # of the first GPUs with float8 products
MULTIPLE = 16  # a layer's numbers of input and output features must be multiples of it
HEAD = "*head*"
"""Matches the name of the layer that returns logits in most models. It is not an error if no layer matches."""


def find_linear(model: nn.Module, exclude: Sequence[str]) -> list[str]:
    """Return the names of linear layers whose sizes are multiples of 16 and whose names match no excluded pattern."""
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
    ]


class Float8(Algorithm):
    """Makes linear layers multiply in 8 bits, with scales recomputed each time; needs torchao.

    Inputs, weights and gradients are rounded to float8 for the three products of each layer. Weights and optimizers
    keep their format, and everything else follows `trainer.precision`, preferably amp_bf16. It pays off for large
    layers on GPUs with float8 products, and only together with `Compile`, which fuses the rounding with earlier
    operations.

    Args:
        recipe: 'tensorwise': one scale for a tensor, the fastest; 'rowwise': one for each row, more precise;
            'rowwise_with_gw_hp': 'rowwise' with gradients of weights in their own format, the most precise.
        exclude: shell patterns for names of layers to leave unchanged; by default the layer that returns logits.
        emulate: whether to round in the same way and then multiply as before, which works on any device, but slowly.

    Raises:
        ImportError: the package torchao is not installed.
        ValueError: the recipe is unknown, or `exclude` is not a list; or, at INIT, `emulate` is False and the device is
            not a GPU of capability 8.9 or more, a pattern matches no linear layer, no layer remains for float8, or
            'rowwise_with_gw_hp' is combined with autocast on a device other than a GPU.

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
            requirement = f"a CUDA device of capability {'.'.join(map(str, CAPABILITY))} or more, not {device}"
            raise ValueError(f"Float8 needs {requirement}: leave it out, or try it with emulate=True")
        if self.recipe == "rowwise_with_gw_hp" and device.type != "cuda" and state.precision.startswith("amp"):
            raise wrong_argument("recipe", self.recipe, f"torchao ignores autocast on {device}: set precision='fp32'")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

        model = state.unwrapped_model
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        unmatched = [pattern for pattern in self.exclude if pattern != HEAD and not fnmatch.filter(linear, pattern)]
        if unmatched:
            raise wrong_argument(
                "exclude",
                self.exclude,
                f"{', '.join(map(repr, unmatched))} matches no linear layer; there are {', '.join(linear[:8])}"
                f"{', ...' * (len(linear) > 8)}",
            )
        names = find_linear(model, self.exclude)
        report(self, state, names, f"linear layer with sizes that are multiples of {MULTIPLE}")
        # Padded, because the last batch of an epoch may have any size.
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulate, pad_inner_dim=True
        )
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
