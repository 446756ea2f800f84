"""Tensor parallelism: each layer is split over a group of ranks, which see the same samples (torch's DTensor).

Between the layers of a block, activations are split by column (features of an MLP, heads of an attention); after it,
and outside of blocks, each rank of the group has all of them. A plan says how the layers of a family of models are
split. It names every layer with weights: a model with others, as surgery leaves it, would train with wrong gradients.
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
"""How the layers of a family are split, by the names of its class and of its modules."""
JOINED = 3  # queries, keys and values
PER_HEAD = ("CausalAttention", "Identity", "_Rotary", "_HeadNorm")
"""Modules without weights that may stand in a GPT's attention: they treat each head by itself, and alike."""


def find_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return how each layer of a model is split, by the layer's name."""
    said = f"tensor_parallel={ranks!r}"
    families = [
        (name, one, PLANS[kind.__name__])
        for name, one in model.named_modules()
        for kind in type(one).__mro__
        if kind.__name__ in PLANS
    ]
    if len(families) != 1:
        supported = "the GPT of runner.models, and Llama, Mistral and Qwen2 of transformers as causal language models"
        raise ValueError(f"{said}: only {supported} can be split, not {_kind(model)}; set 1")
    root, family, plan = families[0]
    prefix = f"{root}." if root else ""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((plan[one] for one in plan if fnmatchcase(name, f"{prefix}{one}")), None)
        if style is not None:
            found[name] = style
            outer = model.get_submodule(name.rpartition(".")[0])
            _check_layer(said, name, module, style, ranks, getattr(outer, "head_dim", None))
        elif [*module.parameters(recurse=False)] or not _acts_alike(name, module):
            reason = f"{name} ({type(module).__name__}) is not in the plan for {type(family).__name__}"
            raise ValueError(f"{said}: {reason}; leave out the algorithm that added it, or set 1")
    return found


def _kind(model: nn.Module) -> str:
    inner = getattr(model, "module", None)
    return type(model).__name__ if inner is None else type(inner).__name__


def _acts_alike(name: str, module: nn.Module) -> bool:
    """Return whether a module without weights does the same on a part of the columns as on all."""
    return not fnmatchcase(name, "*blocks.*.attention.*") or type(module).__name__ in PER_HEAD


def _check_layer(said: str, name: str, module: nn.Module, style: str, ranks: int, head_dim: int | None) -> None:
    """Check that a layer can be split."""
    if style == "whole":
        return
    if isinstance(module, nn.Embedding):
        if module.padding_idx is not None:
            raise ValueError(f"{said}: {name} has padding_idx={module.padding_idx!r}, which is not split; set 1")
        return
    if not isinstance(module, nn.Linear):
        reason = f"{name} ({type(module).__name__}) is no plain linear layer, and only those are split"
        raise ValueError(f"{said}: {reason}; leave out the algorithm that added it, or set 1")
    if style == "gathered columns":
        return  # a vocabulary need not divide
    size = module.in_features if style == "rows" else module.out_features // (JOINED if style[0] == "j" else 1)
    what, unit = ("features", 1) if head_dim is None else ("heads", head_dim)
    if size % (unit * ranks):
        raise ValueError(f"{said}: must divide the {size // unit} {what} of {name}")


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a model over the ranks of a mesh of one dimension, in place; all of them have all weights."""
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    plan = find_plan(model, mesh.size())
    for name in plan:
        for key, one in model.get_submodule(name).named_parameters(recurse=False):
            tied.setdefault(id(one), []).append((model.get_submodule(name), key))
    for name, style in plan.items():
        STYLES[style](model.get_submodule(name), mesh)
    for (first, name), *others in tied.values():
        for module, key in others:
            module.register_parameter(key, getattr(first, name))
    for module in model.modules():
        if _drops_apart(module):
            draw_apart(module, mesh.get_local_rank())


def split_parameters(model: nn.Module, ranks: int) -> list[nn.Parameter]:
    """Return the parameters that would be split over a number of ranks; each rank holds the others in full."""
    found: list[nn.Parameter] = []
    for name, style in find_plan(model, ranks).items():
        for key, one in model.get_submodule(name).named_parameters(recurse=False):
            if style != "whole" and not (key == "bias" and style in ("rows", "joined columns")):
                found.append(one)
    return found


def is_joined(parameter: Any) -> bool:
    """Return whether a parameter is split in several parts, each over all ranks, as queries, keys and values are."""
    return any(isinstance(one, _StridedShard) for one in parameter.placements)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Make a layer's parameters DTensors, whole but for those named, between inputs and outputs that are tensors."""
    for key, one in [*module.named_parameters(recurse=False)]:
        placed = distribute_tensor(one.detach(), mesh, [placements.get(key, Replicate())], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(placed, one.requires_grad))

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:])

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda module, inputs, outputs: outputs.to_local())


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a layer whole on each rank, as DTensors: optimizers and norms take no mixture of these and others."""
    _distribute(module, mesh, {})


def _split_joined(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank its heads' columns of the queries, of the keys and of the values."""
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


def _drops_apart(module: nn.Module) -> bool:
    """Return whether a module applies dropout to attention weights, of which each rank has those of other heads."""
    if type(module).__name__ == "CausalAttention":
        return bool(module.dropout > 0)  # pyright: ignore[reportOperatorIssue]
    return hasattr(module, "o_proj") and getattr(module, "attention_dropout", 0) > 0


def draw_apart(module: nn.Module, rank: int) -> None:
    """Make a module's random numbers in training differ between ranks that otherwise draw the same ones."""
    forward = module.forward

    def apart(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        seed = int(torch.randint(2**62, ()))  # on the CPU: waits for no device
        with torch.random.fork_rng():
            torch.manual_seed(seed + rank)
            return forward(*args, **kwargs)

    module.forward = apart
