"""Tensor parallelism: each layer is split over a group of ranks that see the same samples (torch's DTensor).

Between the layers of a block, activations are split by column (features of an MLP, heads of an attention); after and
outside of blocks, each rank of the group has all of them. A plan says how the layers of a family of models are split.
It must name every layer with weights: layers that surgery adds would train with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

GPT = {
    "token_embedding": "tokens",
    "position_embedding": "whole",
    "blocks.*.norm1": "whole",
    "blocks.*.attention.qkv": "joined columns",
    "blocks.*.attention.out": "rows",
    "blocks.*.norm2": "whole",
    "blocks.*.mlp.up": "columns",
    "blocks.*.mlp.down": "rows",
    "norm": "whole",
    "head": "gathered columns",
}
LLAMA = {
    "model.embed_tokens": "tokens",
    "model.layers.*.input_layernorm": "whole",
    "model.layers.*.self_attn.[qkv]_proj": "columns",
    "model.layers.*.self_attn.o_proj": "rows",
    "model.layers.*.post_attention_layernorm": "whole",
    "model.layers.*.mlp.gate_proj": "columns",
    "model.layers.*.mlp.up_proj": "columns",
    "model.layers.*.mlp.down_proj": "rows",
    "model.norm": "whole",
    "lm_head": "gathered columns",
}
PLANS = {"GPT": GPT, "LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA, "Qwen2ForCausalLM": LLAMA}
"""How the layers of each family are split, by the name of its class and of its modules."""
JOINED = 3  # queries, keys and values
PER_HEAD = ("CausalAttention", "Identity", "_Rotary", "_HeadNorm")
"""Modules without weights allowed in a GPT's attention: they do the same with each head, independently."""


def find_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return how each layer of a model is split, by the layer's name."""
    setting = f"tensor_parallel={ranks!r}"
    families = [
        (name, module, PLANS[cls.__name__])
        for name, module in model.named_modules()
        for cls in type(module).__mro__
        if cls.__name__ in PLANS
    ]
    if len(families) != 1:
        supported = "the GPT of runner.models, and Llama, Mistral and Qwen2 of transformers as causal language models"
        raise ValueError(f"{setting}: only {supported} can be split, not {_class_name(model)}; set 1")
    root, family, plan = families[0]
    prefix = f"{root}." if root else ""
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((plan[pattern] for pattern in plan if fnmatchcase(name, f"{prefix}{pattern}")), None)
        if style is not None:
            styles[name] = style
            parent = model.get_submodule(name.rpartition(".")[0])
            _check_layer(setting, name, module, style, ranks, getattr(parent, "head_dim", None))
        elif [*module.parameters(recurse=False)] or not _may_be_split(name, module):
            reason = f"{name} ({type(module).__name__}) is not in the plan for {type(family).__name__}"
            raise ValueError(f"{setting}: {reason}; leave out the algorithm that added it, or set 1")
    return styles


def _class_name(model: nn.Module) -> str:
    inner = getattr(model, "module", None)
    return type(model).__name__ if inner is None else type(inner).__name__


def _may_be_split(name: str, module: nn.Module) -> bool:
    """Return whether a module without weights gives the same result on a part of the columns as on all."""
    return not fnmatchcase(name, "*blocks.*.attention.*") or type(module).__name__ in PER_HEAD


def _check_layer(setting: str, name: str, module: nn.Module, style: str, ranks: int, head_dim: int | None) -> None:
    """Check that a layer can be split."""
    if style == "whole":
        return
    if isinstance(module, nn.Embedding):
        if module.padding_idx is not None:
            raise ValueError(f"{setting}: {name} has padding_idx={module.padding_idx!r}, which cannot be split; set 1")
        return
    if not isinstance(module, nn.Linear):
        reason = f"{name} ({type(module).__name__}) is not a plain linear layer, and only those are split"
        raise ValueError(f"{setting}: {reason}; leave out the algorithm that added it, or set 1")
    if style == "gathered columns":
        return  # ranks need not divide the size of a vocabulary
    size = module.in_features if style == "rows" else module.out_features // (JOINED if style[0] == "j" else 1)
    units, unit = ("features", 1) if head_dim is None else ("heads", head_dim)
    if size % (unit * ranks):
        raise ValueError(f"{setting}: must divide the {size // unit} {units} of {name}")


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a model in place over the ranks of a one-dimensional mesh, all of which have all weights."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    plan = find_plan(model, mesh.size())
    for name in plan:
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((model.get_submodule(name), key))
    for name, style in plan.items():
        STYLES[style](model.get_submodule(name), mesh)
    for (first, name), *tied in owners.values():
        for module, key in tied:
            module.register_parameter(key, getattr(first, name))
    for module in model.modules():
        if _drops_attention(module):
            draw_apart(module, mesh.get_local_rank())


def split_parameters(model: nn.Module, ranks: int) -> list[nn.Parameter]:
    """Return the parameters that would be split over a number of ranks; each rank holds all others in full."""
    parameters: list[nn.Parameter] = []
    for name, style in find_plan(model, ranks).items():
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if style != "whole" and not (key == "bias" and style in ("rows", "joined columns")):
                parameters.append(parameter)
    return parameters


def is_joined(parameter: Any) -> bool:
    """Return whether a parameter has several parts, each split over all ranks, such as queries, keys and values."""
    return any(isinstance(placement, _StridedShard) for placement in parameter.placements)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Turn a layer's parameters into DTensors, split as `placements` says or whole; inputs and outputs stay tensors."""
    for key, parameter in [*module.named_parameters(recurse=False)]:
        placed = distribute_tensor(parameter.detach(), mesh, [placements.get(key, Replicate())], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(placed, parameter.requires_grad))

    def wrap_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:])

    module.register_forward_pre_hook(wrap_input)
    module.register_forward_hook(lambda module, inputs, outputs: outputs.to_local())


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a layer whole on each rank, as DTensors, because optimizers and norms cannot mix these with tensors."""
    _distribute(module, mesh, {})


def _split_joined(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank the columns of its heads in the queries, the keys and the values."""
    _distribute(module, mesh, {"weight": _StridedShard(0, split_factor=JOINED)})


def _parallelize(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(module, mesh, style(), src_data_rank=None)


STYLES: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "whole": _keep_whole,
    "rows": partial(_parallelize, RowwiseParallel),
    "tokens": partial(_parallelize, partial(RowwiseParallel, input_layouts=Replicate())),
    "columns": partial(_parallelize, ColwiseParallel),
    "gathered columns": partial(_parallelize, partial(ColwiseParallel, output_layouts=Replicate())),
    "joined columns": _split_joined,
}


def _drops_attention(module: nn.Module) -> bool:
    """Return whether a module applies dropout to attention weights; each rank has those of its own heads."""
    if type(module).__name__ == "CausalAttention":
        return bool(module.dropout > 0)  # pyright: ignore[reportOperatorIssue]
    return hasattr(module, "o_proj") and getattr(module, "attention_dropout", 0) > 0


def draw_apart(module: nn.Module, rank: int) -> None:
    """Make a module draw different random numbers on each rank in training; otherwise ranks draw the same ones."""
    forward = module.forward

    def forward_with_own_seed(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        seed = int(torch.randint(2**62, ()))  # on the CPU, without waiting for a device
        with torch.random.fork_rng():
            torch.manual_seed(seed + rank)
            return forward(*args, **kwargs)

    module.forward = forward_with_own_seed
