"""Sharded models: each rank keeps a part of the weights, gradients and optimizer state (torch's FSDP2 and DTensor).

`parallel='fsdp'` gathers a block while it computes; `tensor_parallel` splits the computation of each layer as well, see
`runner.distributed.tensor_parallel`. Together they use a mesh of ranks, in which the ranks of one row share layers.

A sharded tensor is a DTensor. It is recognized by its method `full_tensor`, because importing its class takes a second.
Use `local(tensor)` for elementwise arithmetic, and `whole(tensor)` for reductions such as a norm: on the local part
these would be wrong, without an error.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.distributed.blocks import find_units
from runner.distributed.collectives import replicate
from runner.distributed.deferred import Draw, deferred_draws, fill_deferred, move_without_deferred
from runner.distributed.ranks import get_data_parallel_size, get_world_size, share_samples
from runner.distributed.saved_tensor import SavedTensor, as_plain, layout_of
from runner.failures.checks import check_one_of, check_whole, refuse_if
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("runner")

PARALLEL = ("ddp", "fsdp")
OUTLINES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""A copy of each sharded model without weights, made before sharding, because torch cannot copy sharded models."""
GATHER_DTYPES = {None: None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How a model is laid out on ranks: a replica on each, shards, or split layers. The arguments are the Trainer's.

    A single process cannot shard, and trains the same with every layout.

    Args:
        parallel: 'ddp' or 'fsdp'.
        shard_size: number of ranks that share one copy of the weights; None: all.
        gather_dtype: 'bfloat16' gathers weights and computes in that type; None: in the type of the weights.
        tensor_parallel: number of consecutive ranks that split each layer and see the same samples; 1: no split.

    Raises:
        ValueError: an argument is wrong, or does nothing with 'ddp'.
    """

    parallel: str = "ddp"
    shard_size: int | None = None
    gather_dtype: str | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        allowed = "must be 'ddp' (each rank has all weights) or 'fsdp' (each rank has a part of them)"
        refuse_if(self.parallel not in PARALLEL, "parallel", self.parallel, allowed)
        check_one_of("gather_dtype", self.gather_dtype, GATHER_DTYPES)
        check_whole("shard_size", self.shard_size, 2, "a number of ranks", none="all")
        check_whole("tensor_parallel", self.tensor_parallel, 1, "a number of ranks")
        for name in ("shard_size", "gather_dtype"):
            if self.parallel == "ddp" and getattr(self, name) is not None:
                raise wrong_argument(name, getattr(self, name), "does nothing with parallel='ddp'; set 'fsdp'")

    def check_ranks(self, ranks: int) -> None:
        """Check that this number of ranks can share copies of the weights."""
        if ranks == 1:
            return
        rows, remainder = divmod(ranks, self.tensor_parallel)
        refuse_if(remainder, "tensor_parallel", self.tensor_parallel, f"must divide the {ranks} ranks")
        if self.shard_size is not None and rows % self.shard_size:
            group = f"{ranks} ranks" if rows == ranks else f"{rows} ranks that see different samples"
            raise wrong_argument("shard_size", self.shard_size, f"must divide the {group}, or be None for all")

    @property
    def shards(self) -> bool:
        """Whether each of several ranks holds only a part of the weights."""
        return self.parallel == "fsdp" or self.tensor_parallel > 1

    @property
    def _setting(self) -> str:
        return "parallel='fsdp'" if self.parallel == "fsdp" else f"tensor_parallel={self.tensor_parallel!r}"

    def join(self) -> None:
        """Make the ranks that split layers see the same samples. All ranks, in the process group."""
        share_samples(self.tensor_parallel if get_world_size() > 1 else 1)

    def check(self, model: nn.Module, microbatch_size: int | str | None) -> None:
        """Check that a model can have this layout on the current ranks."""
        self.check_ranks(get_world_size())
        if not self.shards or get_world_size() == 1:
            return
        if microbatch_size == "auto":
            reason = "a rank that runs out of memory cannot retry while other ranks wait for its shard"
            raise ValueError(f"microbatch_size='auto': not with {self._setting}: {reason}; give a number of samples")
        refuse_generation(model)
        if getattr(model, "training_step", None) is not None:
            name = type(model).__name__
            remedy = "set parallel='ddp'" if self.parallel == "fsdp" else "set 1"
            raise ValueError(f"{self._setting}: {name}.training_step would see weights in shards; {remedy}")

    def reduces_in_backward(self, model: nn.Module, microbatch_size: int | str | None) -> bool:
        """Return whether backward averages gradients over the ranks; otherwise each step has to."""
        if get_data_parallel_size() == 1 or self.parallel == "fsdp":
            return True
        if self.tensor_parallel > 1:
            return False  # DDP takes no DTensors
        # DDP does not see what a training_step does outside of forward(), nor that another rank ran out of memory. It
        # also sums the gradients of its first batch in a different order than later, so with three or more ranks the
        # last bit may differ.
        exact = get_world_size() > 2 and torch.are_deterministic_algorithms_enabled()
        return getattr(model, "training_step", None) is None and microbatch_size != "auto" and not exact

    def move(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move a model to this rank's device; give weights their values first, unless they will be sharded."""
        if self.shards and get_world_size() > 1:
            move_without_deferred(model, device, dtype)
            return
        if device.type != "meta":
            fill_deferred(model)
        model.to(device, dtype)

    def place(self, model: nn.Module, device: torch.device, forward_methods: Iterable[str] = ()) -> None:
        """Copy rank 0's weights to all ranks, then split and shard a model in place; replicas do not change. All ranks.

        `forward_methods` names methods other than `forward` that call the model's layers, and so need whole weights.
        """
        if not self.shards:
            return
        if get_world_size() == 1:
            log.info("%s: a single process has no other ranks to share its weights with", self._setting)
            return
        if self.parallel == "fsdp":
            check_parameters(model)
        draws = deferred_draws(model)
        broadcast_tensors(model)
        with suppress(Exception):  # a model that cannot be copied can be trained
            OUTLINES[model] = copy_outline(model)
        from torch.distributed.device_mesh import init_device_mesh

        ranks = get_data_parallel_size()
        size = 1 if self.parallel == "ddp" else self.shard_size or ranks
        sizes = {"replicate": ranks // size, "shard": size, "tensor": self.tensor_parallel}
        names = tuple(name for name in sizes if sizes[name] > 1 or (name == "shard" and self.parallel == "fsdp"))
        mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        if self.tensor_parallel > 1:
            from runner.distributed.tensor_parallel import split_layers

            split_layers(model, mesh["tensor"])
            # Gathering tensors that are split both ways takes two steps, and torch warns about that for each tensor.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        if self.parallel == "fsdp":
            self._shard(model, mesh[names[: names.index("shard") + 1]], forward_methods)
        if draws:
            fill_shards(model, device, draws)

    def _shard(self, model: nn.Module, mesh: DeviceMesh, forward_methods: Iterable[str]) -> None:
        """Shard a model in place over the ranks of a mesh."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        dtype = GATHER_DTYPES[self.gather_dtype]
        # Gradients are summed, and outputs returned, in the type that they have without the policy.
        full_dtype = next(model.parameters()).dtype if dtype is not None else None
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=full_dtype)
        outer = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=full_dtype, output_dtype=full_dtype)
        placement = partial(_shard_dimension, shards=mesh.size(-1)) if self.tensor_parallel > 1 else None
        for unit in find_units(model).values():
            fully_shard(unit, mesh=mesh, mp_policy=inner, shard_placement_fn=placement)
        # By default the root stays whole after an evaluation, and its parameters are then not those of the optimizer.
        fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=outer, shard_placement_fn=placement)
        for name in forward_methods:
            register_fsdp_forward_method(model, name)

    def compile(self, model: nn.Module) -> None:
        """Compile a model as a whole, or unit by unit if it is sharded."""
        for module in find_units(model).values() if is_sharded(model) else [model]:
            module.compile()

    def wrap(self, model: nn.Module, device: torch.device, ddp_options: Mapping[str, Any]) -> nn.Module:
        """Return the module to call in training: the model within DDP, or itself if it is sharded or in one process."""
        if not is_sharded(model):
            return replicate(model, device, ddp_options)
        if ddp_options:
            raise ValueError(f"{self._setting}: the algorithm DDP sets how replicas are averaged; remove it")
        return model


def _shard_dimension(parameter: Any, shards: int) -> Any:
    """Return the dimension along which to shard a parameter of a split layer; None for the first."""
    from torch.distributed.tensor import Shard

    from runner.distributed.tensor_parallel import is_joined

    if not is_joined(parameter):
        return None
    if (columns := parameter.shape[1]) % shards:
        raise ValueError(
            f"parallel='fsdp': {shards} ranks must divide the {columns} columns of queries, keys and values"
        )
    return Shard(1)


def check_parameters(model: nn.Module) -> None:
    """Check that the parameters of a model can be sharded."""
    remedy = "or set parallel='ddp'"
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ValueError(f"parallel='fsdp': {name} is a scalar, which has no rows to shard; make it (1,), {remedy}")
        if not parameter.is_contiguous():
            raise ValueError(
                f"parallel='fsdp': {name} is not contiguous (as ChannelsLast leaves it); undo that, {remedy}"
            )


@torch.no_grad()
def broadcast_tensors(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks, which may have initialized theirs differently. All ranks."""
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor, src=0)


@torch.no_grad()
def fill_shards(model: nn.Module, device: torch.device, draws: Mapping[str, Draw]) -> None:
    """Draw or read the values of a sharded model's parameters, one at a time, and keep this rank's part. All ranks.

    `draws` has a function for each value, by name. Rank 0 sends drawn values to all, but each rank reads files itself.
    """
    ready = {name: parameter for name, parameter in model.named_parameters() if name not in draws}
    kept = {name: local(tensor).clone() for name, tensor in (*ready.items(), *model.named_buffers())}
    model.to_empty(device=device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in kept:
            local(tensor).copy_(kept[name])
            continue
        value = draws[name]()
        if not isinstance(value, SavedTensor):
            dist.broadcast(value, src=0)
            value = value.to(tensor.dtype)
        local(tensor).copy_(local(like(value, tensor)))


def is_sharded(value: Tensor | nn.Module) -> bool:
    """Return whether this rank holds only a part of a tensor, or of any parameter of a module."""
    if isinstance(value, nn.Module):
        return any(map(is_sharded, value.parameters()))
    return hasattr(value, "full_tensor")


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether this rank holds only a part of at least one of the tensors."""
    # Checks each class once: to check each tensor would take as long as a norm of a small one.
    return any(hasattr(cls, "full_tensor") for cls in set(map(type, tensors)))


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; an unsharded tensor unchanged."""
    # As a decorator, no_grad would cost nine Python calls for each tensor in each batch.
    return torch.no_grad()(tensor.to_local)() if is_sharded(tensor) else tensor.detach()


def refuse_generation(model: nn.Module) -> None:
    """Raise ValueError if a model to shard generates texts in evaluations, for which each rank needs whole weights."""
    reason = "texts are not generated by a sharded model; set trainer.parallel=ddp, or generation=null"
    refuse_if(getattr(model, "generates", False), "generation", True, reason)


@torch.no_grad()
def whole(tensor: Any) -> Tensor:
    """Return a sharded tensor gathered from all ranks, in new memory; an unsharded tensor unchanged. All ranks."""
    if not is_sharded(tensor):
        return tensor.detach()
    gathered = tensor.full_tensor()
    # If rows do not divide, the result is a view of padded memory, and the padding would be kept and saved with it. If
    # every rank holds the whole tensor, as next to split layers, the result is the rank's own memory.
    storage = gathered.untyped_storage()
    is_new = storage.data_ptr() != tensor.to_local().untyped_storage().data_ptr()
    return gathered if is_new and storage.nbytes() == gathered.nbytes else gathered.clone()


def added_up(reduced: Any) -> Tensor:
    """Return a norm or sum of a sharded tensor over some dimensions, added up over the ranks. All ranks."""
    if not is_sharded(reduced) or not any(placement.is_partial() for placement in reduced.placements):
        return reduced
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in reduced.placements]
    return reduced.redistribute(placements=placements)


def count_copies(model: nn.Module) -> int:
    """Return the number of copies of the weights; of n ranks, ranks r, r + n / copies, ... hold the same part."""
    parameters: Iterator[Any] = model.parameters()
    mesh = next((parameter.device_mesh for parameter in parameters if is_sharded(parameter)), None)
    return get_world_size() if mesh is None else get_world_size() // mesh.size() * _copies_within(mesh)


def _copies_within(mesh: DeviceMesh) -> int:
    return mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1


def copy_outline(model: nn.Module) -> nn.Module:
    """Return a copy of a model with parameters on the meta device, which takes no memory."""
    empty = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)


def copy_whole(model: nn.Module) -> nn.Module | None:
    """Return a copy of a sharded model with whole weights on the CPU; None on ranks other than 0. All ranks."""
    if model not in OUTLINES:
        raise TypeError(f"{type(model).__name__} cannot be copied with copy.deepcopy, so it cannot be gathered")
    is_rank_zero = dist.get_rank() == 0
    gathered: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():  # one at a time
        value = whole(parameter)
        if is_rank_zero:
            gathered[id(parameter)] = nn.Parameter(value.cpu(), requires_grad=parameter.requires_grad)
    if not is_rank_zero:
        return None
    clone = copy.deepcopy(OUTLINES[model]).train(model.training)
    names = model.named_parameters(remove_duplicate=False)
    clone.load_state_dict({name: gathered[id(parameter)] for name, parameter in names}, strict=False, assign=True)
    for target, source in zip(clone.buffers(), model.buffers(), strict=True):
        target.copy_(source)
    for target, source in zip(clone.modules(), model.modules(), strict=True):
        # Copy numbers that training has changed, such as drop rates.
        numbers = {key: value for key, value in vars(source).items() if isinstance(value, bool | int | float)}
        vars(target).update({key: value for key, value in numbers.items() if key in vars(target)})
    return clone


def like(value: Tensor, other: Any) -> Tensor:
    """Return a tensor, whole on each rank, with the device and shards of another one of the same shape.

    From a sharded checkpoint, a rank reads only the part that it keeps.
    """
    if is_sharded(value) or not is_sharded(other):
        return as_plain(value).to(other.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, SavedTensor):
        part = value.read_shard(layout_of(other)).to(other.device)
        mesh = other.device_mesh, other.placements
        return DTensor.from_local(part, *mesh, run_check=False, shape=other.shape, stride=other.stride())
    return distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)  # copies the shard


def like_parameters(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's saved state, whole on each rank, with its tensors sharded like their parameters."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))

    def shard(number: int, value: Any) -> Any:
        owner = owners.get(number)
        if owner is None or not is_sharded(owner) or not isinstance(value, Tensor) or value.shape != owner.shape:
            return as_plain(value)  # such as a count of steps
        return like(value, owner)

    state = {
        number: {key: shard(number, value) for key, value in entries.items()}
        for number, entries in saved["state"].items()
    }
    return {**saved, "state": state}
