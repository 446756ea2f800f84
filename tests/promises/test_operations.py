"""Nothing on the per-batch path waits for the device or for MLflow.

The Trainer also adds few operations and hardly any memory to a hand-written training step. On the CPU,
`benchmarks/operations.py` counts the operations, copies and reads of a step, and `LiveBytes` its memory. Callbacks and
algorithms add a limited number of operations. Those that watch or average parameters need as many operations for many
parameters as for few.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark_modules import load
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner import Callback, ClassificationModel, LanguageModel, Trainer, algorithms, callbacks
from runner.data import TensorLoader
from runner.models import GPT, ResNet8
from runner.models.loss import total_of
from runner.trials.live_bytes import LiveBytes

operations = load("benchmark_of_operations", "operations.py")

MOST_ADDED = 2
"""Operations that the Trainer may add to a step. Metrics and logging need more, but selecting the samples of several
batches at once saves some."""


@pytest.mark.parametrize("title", ["mlp", pytest.param("resnet18", marks=pytest.mark.slow), "gpt"])
def test_the_trainer_adds_few_operations(title: str, tmp_path: Path):
    task = operations.TASKS[title]
    loop_counts, trainer_counts = operations.by_hand(task), operations.with_trainer(task, tmp_path)
    assert loop_counts.operations.total() > 10 * len(operations.WATCHED)  # the backward pass is counted too
    extra = difference(trainer_counts, loop_counts.row())
    assert extra[0] <= MOST_ADDED and extra[1:4] == [0, 0, 0]
    assert extra[4] <= 30  # calls of Python functions


def test_automatic_microbatches_add_at_most_three_operations(tmp_path: Path):
    counts = operations.with_trainer(TASKS["resnet8"], tmp_path, microbatch_size="auto")
    extra = difference(counts, plain_row("resnet8"))
    assert extra[0] <= 3 and extra[1:4] == [0, 0, 0] and extra[4] <= 36


def test_counts_keep_copies_and_reads_apart_and_ignore_views_and_allocations():
    counts = operations.Counts()
    x = torch.ones(4)
    with operations.Operations(counts), operations.Methods(counts):
        x.view(2, 2).t()  # a view
        torch.empty(3)  # an allocation
        _ = x + 1
        torch.tensor([1.0, 2.0])
        x[0].item()
    assert counts.operations == {"aten.add": 1} and counts.copies == {"pageable": 1} and counts.copied == 8
    assert set(counts.reads) == {"item", "aten._local_scalar_dense"}


class Peak(Callback):
    """Records the peak of live bytes in each batch, and whether old outputs still exist when a forward pass begins."""

    def __init__(self, live: LiveBytes):
        self.live = live
        self.peaks: list[int] = []
        self.holds_outputs: list[bool] = []

    def init(self, state, logger):
        state.unwrapped_model.register_forward_pre_hook(
            lambda *_: self.holds_outputs.append(hasattr(state, "outputs") or hasattr(state, "loss"))
        )

    def batch_start(self, state, logger):
        self.live.peak = self.live.live
        if state.timestamp.batch:
            assert state.outputs.requires_grad and total_of(state.loss).requires_grad  # hooks may still read them

    def batch_end(self, state, logger):
        self.peaks.append(self.live.peak)


def make_tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(50_000, (12, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_gpt() -> GPT:
    return GPT(50_000, context=16, d_model=8, n_layers=2, n_heads=2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peak_by_hand(grad_accum: int) -> int:
    """Return the peak of live bytes in the third step of a loop that frees logits before the next forward pass."""
    module = make_gpt()
    optimizer = sgd(module.parameters())

    def train_microbatch(inputs: Tensor, targets: Tensor) -> None:
        logits = module(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 64  # tokens in a batch
        loss.backward()

    inputs, targets = make_tokens()
    with LiveBytes() as live:
        for batch in range(3):
            optimizer.zero_grad()
            live.peak = live.live
            rows = slice(4 * batch, 4 * batch + 4)
            for microbatch in zip(inputs[rows].chunk(grad_accum), targets[rows].chunk(grad_accum), strict=True):
                train_microbatch(*microbatch)
            optimizer.step()
    return live.peak


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_memory_never_holds_the_logits_of_two_forward_passes(grad_accum: int, tmp_path: Path):
    with LiveBytes() as live:
        peak = Peak(live)
        loader = TensorLoader(*make_tokens(), batch_size=4, shuffle=False)
        model = LanguageModel(make_gpt())
        with Trainer(
            model=model,
            train_dataloader=loader,
            eval_dataloader=loader,
            optimizers=sgd,
            callbacks=[peak],
            grad_accum=grad_accum,
            device="cpu",
            run_dir=tmp_path,
        ) as trainer:
            trainer.fit()
    assert peak.holds_outputs == [False] * (3 * grad_accum + 3)
    assert 0.95 < peak.peaks[-1] / peak_by_hand(grad_accum) < 1.01


def test_live_bytes_counts_memory_until_its_last_reference_is_gone():
    with LiveBytes() as live:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp()  # autograd saves it for the backward pass, so that it outlives `del y`
        z = y.sum()
        view = x.detach().view(10, 100)
        assert live.live == 8004
        del y
        assert live.live == 8004
        z.backward()
        assert live.live == 8004  # the gradient of x has replaced the exponentials
        del x, z
        assert live.live == 4000
        del view
    assert live.live == 0 and live.peak == 12008


# For each algorithm, the cheapest network that it supports, and the most that it may add to a step: operations, and
# tensors copied from the host.
LIMITS = {
    "ALiBi": ("gpt", -5, 0),
    "ActivationCheckpointing": ("resnet8", 57, 0),
    "AugMix": ("resnet8", 285, 7),
    "BatchAugment": ("resnet8", 4, 0),
    "BatchSizeWarmup": ("mlp", 0, 0),
    "BlurPool": ("resnet8", 24, 0),
    "ChannelsLast": ("resnet8", 1, 0),
    "ColOut": ("resnet8", 5, 0),
    "CutMix": ("resnet8", 35, 0),
    "CutOut": ("resnet8", 11, 1),
    "EMA": ("resnet8", 2, 0),
    "Factorize": ("resnet8", 16, 0),
    "GatedLinearUnits": ("gpt", 48, 0),
    "GhostBatchNorm": ("resnet8", 63, 0),
    "GradientClipping": ("gpt", 8, 0),
    "GyroDropout": ("gpt", 44, 0),
    "InfoBatch": ("mlp", 30, 0),
    "LAWA": ("mlp", 0, 0),
    "LabelSmoothing": ("mlp", 17, 0),
    "LayerFreezing": ("mlp", 0, 0),
    "LogitSoftcap": ("gpt", 6, 0),
    "LowPrecisionLayerNorm": ("gpt", 0, 0),
    "MixUp": ("mlp", 34, 0),
    "NGramEmbedding": ("gpt", 34, 0),
    "NaNGuard": ("mlp", 13, 0),
    "ProgressiveResizing": ("resnet8", 2, 0),
    "QKNorm": ("gpt", 264, 0),
    "RandAugment": ("resnet8", 132, 5),
    "RotaryEmbedding": ("gpt", 115, 0),
    "SAM": ("mlp", 27, 0),
    "SWA": ("mlp", 1, 0),
    "ScheduleFree": ("mlp", 5, 0),
    "SelectiveBackprop": ("mlp", 11, 1),
    "SeqLengthWarmup": ("gpt", 1, 0),
    "SpikeGuard": ("mlp", 5, 0),
    "SqueezeExcite": ("resnet8", 136, 0),
    "StochasticDepth": ("resnet8", 2, 1),
    "TrivialAugment": ("resnet8", 76, 3),
    "ValueEmbedding": ("gpt", 18, 0),
    "WeightStandardization": ("resnet8", 18, 0),
}
READS = {"InfoBatch": 3, "NaNGuard": 1, "StochasticDepth": 1}
"""Values that an algorithm may read in a step; others read none. Only `NaNGuard` reads a value from the device."""
CALLS = {"ActivationCheckpointing": 2700}
MOST_CALLS = 300
"""Calls of Python functions that an algorithm may add to a step, if it is not in `CALLS`."""
NO_LIMIT = {"LowPrecisionGroupNorm": "is like LowPrecisionLayerNorm, and no network here has group norms"}
ARGUMENTS = {**operations.ARGUMENTS, "SqueezeExcite": {"min_channels": 16}, "Factorize": {"min_channels": 16}}
TASKS = {
    **operations.TASKS,
    "resnet8": replace(operations.TASKS["resnet18"], module=ResNet8, data=lambda: operations.make_images(1, 8, 8)),
}


def test_every_algorithm_has_a_limit_or_a_reason_for_having_none():
    assert sorted({*LIMITS, *NO_LIMIT, *operations.LEFT_OUT} & {*algorithms.__all__}) == sorted(algorithms.__all__)


@functools.cache
def plain_row(title: str) -> list[float]:
    """Return the counts of a step of the Trainer without algorithms."""
    with tempfile.TemporaryDirectory() as folder:
        return operations.with_trainer(TASKS[title], Path(folder)).row()


def difference(counts: Any, plain: list[float]) -> list[float]:
    """Return by how much the counts of a step exceed `plain`: operations, copies, bytes, reads and calls."""
    return [after - before for after, before in zip(counts.row(), plain, strict=True)]


@pytest.mark.parametrize("name", LIMITS)
def test_an_algorithm_stays_within_its_limit(name: str, tmp_path: Path):
    title, most_operations, most_copies = LIMITS[name]
    algorithm = getattr(algorithms, name)(**ARGUMENTS.get(name, {}))
    extra = difference(operations.with_trainer(TASKS[title], tmp_path, algorithms=[algorithm]), plain_row(title))
    assert extra[0] <= most_operations and extra[1] <= most_copies
    assert extra[3] <= READS.get(name, 0) and extra[4] <= CALLS.get(name, MOST_CALLS)


def test_adaptive_clipping_needs_three_operations_per_parameter(tmp_path: Path):
    clipping = algorithms.GradientClipping("adaptive", 0.1)
    counts = operations.with_trainer(TASKS["gpt"], tmp_path, algorithms=[clipping])
    parameters = len([*operations.make_module(TASKS["gpt"]).parameters()])
    assert difference(counts, plain_row("gpt"))[0] <= 3 * parameters + 6


def test_sample_ledger_records_losses_without_waiting_for_the_device(tmp_path: Path):
    counts = operations.with_trainer(TASKS["mlp"], tmp_path, callbacks=[callbacks.SampleLedger()])
    extra = difference(counts, plain_row("mlp"))
    assert extra[0] <= 21 and extra[3] == 0


def test_all_callbacks_together_add_at_most_three_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    left_out = {*operations.LEFT_OUT, "SampleLedger"}  # which has a test of its own
    names = [name for name in callbacks.__all__ if name not in left_out]
    instances = [getattr(callbacks, name)(**ARGUMENTS.get(name, {})) for name in names]
    counts = operations.with_trainer(TASKS["mlp"], tmp_path / "run", callbacks=instances)
    extra = difference(counts, plain_row("mlp"))
    assert extra[0] <= 3 and extra[1:4] == [0, 0, 0]


FEW, MANY = 5, 50  # parameters


WATCHERS: dict[str, dict[str, Any]] = {
    "EMA": {"algorithms": [lambda: algorithms.EMA("10ba")]},
    "OptimizerMonitor": {"callbacks": [lambda: callbacks.OptimizerMonitor(batch_log_interval=1)]},
    "StateDigest": {"callbacks": [lambda: callbacks.StateDigest("1ba")]},
}


class Vectors(nn.Module):
    """A network with `tensors` parameters, each of shape `(3,)`."""

    def __init__(self, tensors: int):
        super().__init__()
        self.parts = nn.ParameterList(torch.full((3,), 0.1) for _ in range(tensors))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.stack([*self.parts]).sum(0)


class OperationCounter(TorchDispatchMode):
    """Counts all operations of this thread, including views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class LastBatches(Callback):
    """Counts the operations of the last two of five batches."""

    def __init__(self):
        self.counter = OperationCounter()

    def before_dataloader(self, state, logger):
        if state.timestamp.batch == 3:
            self.counter.__enter__()

    def epoch_end(self, state, logger):
        self.counter.__exit__(None, None, None)


def count_operations(tensors: int, run_dir: Path, watchers: dict[str, Any]) -> int:
    last_batches = LastBatches()
    hooks: dict[str, Any] = {group: [make() for make in makers] for group, makers in watchers.items()}
    with Trainer(
        model=ClassificationModel(Vectors(tensors), 3),
        train_dataloader=TensorLoader(torch.rand(10, 3), torch.arange(10) % 3, batch_size=2, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        max_duration="1ep",
        loggers=[callbacks.InMemoryLogger()],
        device="cpu",
        run_dir=run_dir,
        **{**hooks, "callbacks": [last_batches, *hooks.get("callbacks", [])]},
    ) as trainer:
        trainer.fit()
    return last_batches.counter.count


@pytest.mark.parametrize("name", WATCHERS)
def test_operations_do_not_grow_with_the_number_of_parameters(name: str, tmp_path: Path):
    few, many = (
        count_operations(tensors, tmp_path, WATCHERS[name]) - count_operations(tensors, tmp_path, {})
        for tensors in (FEW, MANY)
    )
    assert 0 < few == many
