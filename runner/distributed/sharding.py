"""Sharded models: each rank keeps a part of the weights, gradients and optimizer state (torch's FSDP2, and DTensor).

`parallel='fsdp'` gathers a block while it computes; `tensor_parallel` splits the computation of each layer as well, see
`runner.distributed.tensor_parallel`. Both together work on a mesh of ranks: those of one row share layers.

A sharded tensor is a DTensor. It is recognized by its method `full_tensor`, because importing its class takes a second.
Arithmetic on single elements belongs on `local(tensor)`. What adds up elements, such as a norm, needs `whole(tensor)`:
of the local part alone it would be wrong, without an error.
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
from runner.distributed.deferred import Draw, deferred, fill, free
from runner.distributed.ranks import get_data_parallel_size, get_world_size, share_samples
from runner.distributed.saved_tensor import SavedTensor, place_of, unsaved
from runner.failures.checks import check_one_of, check_whole, refuse_if
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("runner")

PARALLEL = ("ddp", "fsdp")
OUTLINES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""A copy of each sharded model, made before, without weights: torch does not copy what it has sharded."""
GATHER_DTYPES = {None: None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How a model lies on the ranks: a replica on each, shards, or split layers; the arguments are the Trainer's.

    A single process has nothing to shard with, and trains the same with either.

    Args:
        parallel: 'ddp' or 'fsdp'.
        shard_size: the number of ranks that share one copy of the weights; None: all.
        gather_dtype: 'bfloat16' gathers weights, and computes, in that type; None in their own.
        tensor_parallel: the number of ranks, in a row, that split each layer and see the same samples; 1: none do.

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
        rows, rest = divmod(ranks, self.tensor_parallel)
        refuse_if(rest, "tensor_parallel", self.tensor_parallel, f"must divide the {ranks} ranks")
        if self.shard_size is not None and rows % self.shard_size:
            those = f"{ranks} ranks" if rows == ranks else f"{rows} ranks that see different samples"
            raise wrong_argument("shard_size", self.shard_size, f"must divide the {those}, or be None for all")

    @property
    def shards(self) -> bool:
        """Whether ranks, if there are several, hold a part of the weights only."""
        return self.parallel == "fsdp" or self.tensor_parallel > 1

    @property
    def _said(self) -> str:
        return "parallel='fsdp'" if self.parallel == "fsdp" else f"tensor_parallel={self.tensor_parallel!r}"

    def join(self) -> None:
        """Let the ranks that split layers see the same samples. All ranks, in the process group."""
        share_samples(self.tensor_parallel if get_world_size() > 1 else 1)

    def check(self, model: nn.Module, microbatch_size: int | str | None) -> None:
        """Check that a model can be laid out like this, on as many ranks as there are."""
        self.check_ranks(get_world_size())
        if not self.shards or get_world_size() == 1:
            return
        if microbatch_size == "auto":
            reason = "a rank that runs out of memory cannot retry while other ranks wait for its shard"
            raise ValueError(f"microbatch_size='auto': not with {self._said}: {reason}; give a number of samples")
        if getattr(model, "training_step", None) is not None:
            name = type(model).__name__
            remedy = "set parallel='ddp'" if self.parallel == "fsdp" else "set 1"
            raise ValueError(f"{self._said}: {name}.training_step would see weights in shards; {remedy}")

    def reduces_in_backward(self, model: nn.Module, microbatch_size: int | str | None) -> bool:
        """Return whether backward averages gradients over the ranks; otherwise the steps have to."""
        if get_data_parallel_size() == 1 or self.parallel == "fsdp":
            return True
        if self.tensor_parallel > 1:
            return False  # DDP takes no DTensors
        # DDP does not see what a training_step does outside of forward(), nor that another rank ran out of memory. It
        # also sums the gradients of its first batch in a different order than later ones, which changes the last bit
        # with three or more ranks.
        exact = get_world_size() > 2 and torch.are_deterministic_algorithms_enabled()
        return getattr(model, "training_step", None) is None and microbatch_size != "auto" and not exact

    def move(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move a model to this rank's device; weights without values get these first, unless they will be sharded."""
        if self.shards and get_world_size() > 1:
            free(model, device, dtype)
            return
        if device.type != "meta":
            fill(model)
        model.to(device, dtype)

    def place(self, model: nn.Module, device: torch.device, forward_methods: Iterable[str] = ()) -> None:
        """Split and shard a model in place, after all got the weights of rank 0; no replica changes. All ranks.

        `forward_methods` names methods that call the model's layers as `forward` does, so that they need whole weights.
        """
        if not self.shards:
            return
        if get_world_size() == 1:
            log.info("%s: a single process has no other ranks to share its weights with", self._said)
            return
        if self.parallel == "fsdp":
            check_parameters(model)
        draws = deferred(model)
        broadcast_tensors(model)
        with suppress(Exception):  # a model that cannot be copied trains all the same
            OUTLINES[model] = copy_outline(model)
        from torch.distributed.device_mesh import init_device_mesh

        ranks = get_data_parallel_size()
        size = 1 if self.parallel == "ddp" else self.shard_size or ranks
        sizes = {"replicate": ranks // size, "shard": size, "tensor": self.tensor_parallel}
        names = tuple(name for name, its in sizes.items() if its > 1 or (name == "shard" and self.parallel == "fsdp"))
        mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        if self.tensor_parallel > 1:
            from runner.distributed.tensor_parallel import split_layers

            split_layers(model, mesh["tensor"])
            # Gathering what is split in both ways takes two steps, of which torch warns for each tensor.
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
        own = next(model.parameters()).dtype if dtype is not None else None
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=own)
        outer = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=own, output_dtype=own)
        place = partial(_dimension, shards=mesh.size(-1)) if self.tensor_parallel > 1 else None
        for unit in find_units(model).values():
            fully_shard(unit, mesh=mesh, mp_policy=inner, shard_placement_fn=place)
        # By default the root would stay whole after an evaluation, and its parameters not be the optimizer's.
        fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=outer, shard_placement_fn=place)
        for name in forward_methods:
            register_fsdp_forward_method(model, name)

    def compile(self, model: nn.Module) -> None:
        """Compile a model: as a whole, or, where it is sharded, each unit by itself."""
        for one in find_units(model).values() if is_sharded(model) else [model]:
            one.compile()

    def wrap(self, model: nn.Module, device: torch.device, ddp_options: Mapping[str, Any]) -> nn.Module:
        """Return a model as it is called in training: within DDP, or itself where it is sharded or alone."""
        if not is_sharded(model):
            return replicate(model, device, ddp_options)
        if ddp_options:
            raise ValueError(f"{self._said}: the algorithm DDP sets how replicas are averaged; remove it")
        return model


def _dimension(parameter: Any, shards: int) -> Any:
    """Return the dimension along which to shard a parameter whose layer is split; None for the first one."""
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
    for name, one in model.named_parameters():
        if one.ndim == 0:
            raise ValueError(f"parallel='fsdp': {name} is a scalar, which has no rows to shard; make it (1,), {remedy}")
        if not one.is_contiguous():
            raise ValueError(
                f"parallel='fsdp': {name} is not contiguous (as ChannelsLast leaves it); undo that, {remedy}"
            )


@torch.no_grad()
def broadcast_tensors(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks, which may have been initialized differently. All ranks."""
    for one in chain(model.parameters(), model.buffers()):
        if not one.is_meta:
            dist.broadcast(one, src=0)


@torch.no_grad()
def fill_shards(model: nn.Module, device: torch.device, draws: Mapping[str, Draw]) -> None:
    """Draw or read the values of a sharded model's parameters, one at a time, and keep this rank's part. All ranks.

    `draws` has a function for each value, by name. What rank 0 draws is sent to all, but each rank reads its own file.
    """
    names = {name: one for name, one in model.named_parameters() if name not in draws}
    kept = {name: local(one).clone() for name, one in (*names.items(), *model.named_buffers())}
    model.to_empty(device=device)
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if name in kept:
            local(one).copy_(kept[name])
            continue
        value = draws[name]()
        if not isinstance(value, SavedTensor):
            dist.broadcast(value, src=0)
            value = value.to(one.dtype)
        local(one).copy_(local(like(value, one)))


def is_sharded(value: Tensor | nn.Module) -> bool:
    """Return whether this rank holds only a part of a tensor, or of any parameter of a module."""
    if isinstance(value, nn.Module):
        return any(map(is_sharded, value.parameters()))
    return hasattr(value, "full_tensor")


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether this rank holds only a part of any of some tensors."""
    # Asked of each class once: asking each tensor takes as long as a norm of a small one.
    return any(hasattr(kind, "full_tensor") for kind in set(map(type, tensors)))


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; an unsharded tensor unchanged."""
    # Around all of this, no_grad would take nine calls of Python for each tensor in each batch.
    return torch.no_grad()(tensor.to_local)() if is_sharded(tensor) else tensor.detach()


@torch.no_grad()
def whole(tensor: Any) -> Tensor:
    """Return a sharded tensor gathered from all ranks, in new memory; an unsharded tensor unchanged. All ranks."""
    if not is_sharded(tensor):
        return tensor.detach()
    gathered = tensor.full_tensor()
    # Where rows do not divide, it is a view of memory with padding, which would be kept, and written, with it. Of what
    # each rank holds whole, beside layers that are split, it is the rank's own memory.
    storage = gathered.untyped_storage()
    is_new = storage.data_ptr() != tensor.to_local().untyped_storage().data_ptr()
    return gathered if is_new and storage.nbytes() == gathered.nbytes else gathered.clone()


def added_up(reduced: Any) -> Tensor:
    """Return a norm or sum over dimensions of a sharded tensor, with the ranks' parts of it added up. All ranks."""
    if not is_sharded(reduced) or not any(one.is_partial() for one in reduced.placements):
        return reduced
    from torch.distributed.tensor import Replicate

    return reduced.redistribute(placements=[Replicate() if one.is_partial() else one for one in reduced.placements])


def count_copies(model: nn.Module) -> int:
    """Return how many copies of the weights the ranks hold; ranks r, r + n / copies, ... of n hold the same part."""
    parameters: Iterator[Any] = model.parameters()
    mesh = next((one.device_mesh for one in parameters if is_sharded(one)), None)
    return get_world_size() if mesh is None else get_world_size() // mesh.size() * _copies_within(mesh)


def _copies_within(mesh: DeviceMesh) -> int:
    return mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1


def copy_outline(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device, where they take no memory."""
    empty = {id(one): nn.Parameter(one.detach().to("meta"), one.requires_grad) for one in model.parameters()}
    return copy.deepcopy(model, empty)


def copy_whole(model: nn.Module) -> nn.Module | None:
    """Return a copy of a sharded model that is whole, on the CPU; None on ranks other than 0. All ranks."""
    if model not in OUTLINES:
        raise TypeError(f"{type(model).__name__} cannot be copied with copy.deepcopy, so it cannot be gathered")
    keeps = dist.get_rank() == 0
    gathered: dict[int, nn.Parameter] = {}
    for one in model.parameters():  # one at a time
        found = whole(one)
        if keeps:
            gathered[id(one)] = nn.Parameter(found.cpu(), requires_grad=one.requires_grad)
    if not keeps:
        return None
    made = copy.deepcopy(OUTLINES[model]).train(model.training)
    names = model.named_parameters(remove_duplicate=False)
    made.load_state_dict({name: gathered[id(one)] for name, one in names}, strict=False, assign=True)
    for one, its in zip(made.buffers(), model.buffers(), strict=True):
        one.copy_(its)
    for one, its in zip(made.modules(), model.modules(), strict=True):  # what training has set, such as rates
        plain = {key: value for key, value in vars(its).items() if isinstance(value, bool | int | float)}
        vars(one).update({key: value for key, value in plain.items() if key in vars(one)})
    return made


def like(value: Tensor, other: Any) -> Tensor:
    """Return a tensor, whole on each rank, laid out like another one of its shape: on its device, in equal shards.

    Of a tensor in a sharded checkpoint, a rank reads the part that it keeps.
    """
    if is_sharded(value) or not is_sharded(other):
        return unsaved(value).to(other.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, SavedTensor):
        part = value.read_at(place_of(other)).to(other.device)
        mesh = other.device_mesh, other.placements
        return DTensor.from_local(part, *mesh, run_check=False, shape=other.shape, stride=other.stride())
    placed = distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)
    return placed.clone()  # a shard by itself: a view would keep the whole tensor in memory


def like_parameters(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's saved state, whole on each rank, with the tensors of sharded parameters in their shards."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))

    def place(number: int, value: Any) -> Any:
        owner = owners.get(number)
        if owner is None or not is_sharded(owner) or not isinstance(value, Tensor) or value.shape != owner.shape:
            return unsaved(value)  # such as a count of steps
        return like(value, owner)

    state = {
        number: {key: place(number, value) for key, value in entries.items()}
        for number, entries in saved["state"].items()
    }
    return {**saved, "state": state}
