"""Options for averaging gradients over ranks: bucket size, static graph and number format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from runner import Algorithm, Logger, State
from runner.distributed.sharding import is_sharded
from runner.failures.checks import check_one_of, check_whole

FORMATS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def averaging_in(dtype: torch.dtype) -> Callable[[Any, Any], Any]:
    """Return a DDP communication hook that averages gradients in a number format, then converts them back."""

    def average(group, bucket):  # torch would refuse annotations, which are strings here
        reduced = bucket.buffer().to(dtype).div_(dist.get_world_size())
        work: Any = dist.all_reduce(reduced, async_op=True)
        return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

    return average


class DDP(Algorithm):
    """Sets how torch's DistributedDataParallel averages gradients over ranks; has no effect in a single process.

    Only two options change results: `compress`, by rounding, and, with three ranks or more, `bucket_cap_mb`, which
    determines the order in which gradients are summed.

    Args:
        bucket_cap_mb: size of the buckets in which gradients are sent during the backward pass, in MiB, at least 1.
            Larger buckets mean fewer messages, which start later.
        static_graph: whether all batches use the same parameters in the same order: DDP then learns the order from the
            first batch, and allows nested activation checkpoints.
        find_unused_parameters: whether a batch may leave out parameters, whose gradients then count as 0; costs a pass
            over the graph in each batch. Not with `static_graph`, which finds unused parameters in the first batch.
        compress: number format in which gradients are sent: 'bf16', 'fp16' or None for their own.

    Raises:
        ValueError: an argument is wrong; or, at INIT, `static_graph` is set with gradient accumulation, which torch
            does not support, or gradients are averaged without DDP; or, after loading, the model is sharded.

    Evidence: some, for faster training over slow networks (torch's communication hooks).
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compress: str | None = None,
    ) -> None:
        check_whole("bucket_cap_mb", bucket_cap_mb, 1, "a number of MiB")
        check_one_of("compress", compress, FORMATS)
        if static_graph and find_unused_parameters:
            raise ValueError("find_unused_parameters=True: does nothing with static_graph=True; leave one of them out")
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.compress = compress
        self._hooked: DistributedDataParallel | None = None

    def init(self, state: State, logger: Logger) -> None:
        if self.static_graph and (state.grad_accum > 1 or state.microbatch_size):
            raise ValueError("static_graph=True: torch cannot accumulate gradients with it; train whole batches")
        if state.unwrapped_model.training_step is not None or state.microbatch_size == "auto":
            model = type(state.unwrapped_model).__name__
            reason = "microbatch_size='auto'" if state.microbatch_size == "auto" else f"{model}.training_step"
            raise ValueError(f"DDP: with {reason}, gradients are averaged after backward, without DDP; leave DDP out")
        state.ddp_options = {
            "bucket_cap_mb": self.bucket_cap_mb,
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
        }

    def after_load(self, state: State, logger: Logger) -> None:
        if is_sharded(state.unwrapped_model):
            raise ValueError("DDP: each rank has a part of the model, so there are no replicas; leave DDP out")

    def fit_start(self, state: State, logger: Logger) -> None:
        dtype = FORMATS[self.compress]
        if dtype is not None and self._hooked is not state.model and isinstance(state.model, DistributedDataParallel):
            self._hooked = state.model
            state.model.register_comm_hook(None, averaging_in(dtype))
