"""Trains the same cases with sharded models and with replicas, for tests and for `benchmarks/exactness.py`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if (here := str(Path(__file__).parents[1] / "algorithms")) not in sys.path:
    sys.path.append(here)

import tasks  # pyright: ignore[reportMissingImports]

from runner import Algorithm, Callback, get_global_rank, get_world_size, save_checkpoint
from runner.algorithms import GradientClipping
from runner.distributed.collectives import destroy_process_group, init_process_group
from runner.distributed.sharding import local, whole
from runner.optim import Muon

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "muon": lambda model: Muon(model),
}
make_trainer = tasks.make_trainer
REFUSED = {
    "channels_last": "is not contiguous",
    "ddp": "DDP: each rank has a part",
    "sam": "SAM cannot be used",
    "spike_guard": "SpikeGuard cannot be used",
}
"""Algorithms that are refused for sharded models, with a part of the message."""
NOT_SPLIT = {
    *("alibi", "factorize", "gated_linear_units", "ngram_embedding", "no_op_model", "qk_norm", "value_embedding"),
}
"""Algorithms that are refused for tensor parallelism, because it cannot split the layers or the attention they add."""
BY_SHARE = {"text: batch_size_warmup", "text: gyro_dropout", "text: selective_backprop"}
"""Cases whose result depends on the number of ranks that read different samples, even with replicas."""


@dataclass(frozen=True)
class Case:
    """A task of `tests/algorithms/tasks.py`, with algorithms, an optimizer and arguments of the Trainer."""

    task: str = "text"
    algorithms: tuple[str | Algorithm, ...] = ()
    optimizer: str = "sgd"
    arguments: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS = {
    f"{task}: {key}": Case(task, (key,)) for task, keys in tasks.FITTING.items() for key in keys if key not in REFUSED
}
CASES: dict[str, Case] = {
    **{f"text: {name}": Case(optimizer=name) for name in OPTIMIZERS},
    **{f"images: {name}": Case("images", optimizer=name) for name in OPTIMIZERS},
    **{
        f"text: {precision}": Case(arguments={"precision": precision}) for precision in ("amp_bf16", "bf16", "amp_fp16")
    },
    "text: two microbatches": Case(arguments={"grad_accum": 2}),
    "text: adaptive clipping": Case(algorithms=(GradientClipping("adaptive", 0.01),)),
    **ALGORITHMS,
}


ROUNDED = {
    *("images: adamw_fused", "images: gradient_clipping", "text: gradient_clipping", "text: two microbatches"),
    *("text: adaptive clipping", "text: bf16"),
}
"""Cases that equal replicas only up to rounding, due to a sum over shards or a kernel that rounds by position."""


SPLIT = [
    name
    for name in CASES
    if name.startswith("text: ") and name not in BY_SHARE and name[6:] not in {*NOT_SPLIT, "bf16"}
]
"""Cases that equal replicas up to rounding if layers are split; weights in bf16 have too few digits to compare."""


class Differently(Algorithm):
    """Gives each rank different weights, as different seeds would, before those of rank 0 are sent to all ranks."""

    def init(self, state, logger):
        with torch.no_grad():
            for parameter in state.unwrapped_model.parameters():
                parameter.add_(get_global_rank())


class Overflow(Algorithm):
    """Makes one gradient in the shard of the last rank infinite in the second batch, before the scaler checks it."""

    def __init__(self):
        self.scales: list[float] = []
        self.stays: list[bool] = []  # for each batch, whether it left the weights unchanged

    def batch_start(self, state, logger):
        self.before = [local(parameter).clone() for parameter in state.unwrapped_model.parameters()]

    def after_backward(self, state, logger):
        if state.timestamp.batch == 1 and get_global_rank() == get_world_size() - 1:
            block: Any = state.unwrapped_model.get_submodule("module.blocks.1")
            local(block.mlp.up.weight.grad)[0, 0] = float("inf")

    def batch_end(self, state, logger):
        now = [local(parameter) for parameter in state.unwrapped_model.parameters()]
        self.stays.append(all(torch.equal(new, old) for new, old in zip(now, self.before, strict=True)))
        self.scales.append(1.0 if state.scaler is None else state.scaler.get_scale())


class Save(Callback):
    """Writes a checkpoint after the third of four batches, in the middle of the second epoch."""

    def __init__(self, path: Path, sharded: bool):
        self.path = path
        self.sharded = sharded

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 3:
            save_checkpoint(state, self.path, sharded=self.sharded)


def train(
    case: Case, folder: Path, save: Path | None = None, sharded: bool = False, **arguments: Any
) -> dict[str, Tensor]:
    """Train a case on all ranks.

    Args:
        case: the case to train.
        folder: the run's folder.
        save: path of a checkpoint to write in the middle of the second epoch.
        sharded: whether each rank writes its part of the checkpoint.
        **arguments: further arguments of the Trainer.

    Returns:
        The whole weights, on each rank; the buffers, on rank 0 only, because a checkpoint contains only those; and the
        values of the last evaluation under 'metrics/...'.
    """
    with (
        torch.compiler.set_stance("force_eager"),  # keeps `Compile` from compiling, which would take seconds
        make_trainer(
            case.task,
            *case.algorithms,
            Differently(),
            folder=folder,
            callbacks=[] if save is None else [Save(save, sharded)],
            **{"optimizers": OPTIMIZERS[case.optimizer], **case.arguments, **arguments},
        ) as trainer,
    ):
        trainer.fit()
        model = trainer.state.unwrapped_model
        buffers = model.named_buffers() if get_global_rank() == 0 else ()
        weights = {name: whole(tensor).clone() for name, tensor in (*model.named_parameters(), *buffers)}
        metrics = trainer.state.eval_metric_values.get("eval", {})
        return {**weights, **{f"metrics/{name}": torch.as_tensor(value) for name, value in metrics.items()}}


@contextmanager
def on_ranks() -> Iterator[None]:
    """Join the other ranks once for all runs in the block."""
    torch.set_num_threads(1)
    init_process_group(torch.device("cpu"))
    yield
    gc.collect()  # ends the threads of DDP
    destroy_process_group()


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between two results, which is 0 if they are bit-identical."""
    assert first.keys() == second.keys()
    unequal = [key for key in first if not torch.equal(first[key], second[key])]
    return max((float((first[key].double() - second[key].double()).abs().max()) for key in unequal), default=0.0)
