"""Nothing on the per-batch path waits for the device or for MLflow.

Nor is much added to what it does: operations, copies, reads and memory of a step are counted as by hand, on the CPU, by
`benchmarks/operations.py`. What watches or averages many parameters needs as many operations as with few.
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

MORE = 2
"""Operations of a step beside those by hand, with loss and metrics logged; picking the batches takes two fewer."""


@pytest.mark.parametrize("title", ["mlp", pytest.param("resnet18", marks=pytest.mark.slow), "gpt"])
def test_the_trainer_adds_few_operations(title: str, tmp_path: Path):
    task = operations.TASKS[title]
    hand, ours = operations.by_hand(task), operations.with_trainer(task, tmp_path)
    assert hand.operations.total() > 10 * len(operations.WATCHED)  # those of the backward pass are seen too
    more = [one - other for one, other in zip(ours.row(), hand.row(), strict=True)]
    assert more[0] <= MORE and more[1:4] == [0, 0, 0]
    assert more[4] <= 30  # calls of Python functions


def test_microbatches_whose_size_is_found_add_three_operations(tmp_path: Path):
    counts = operations.with_trainer(TASKS["resnet8"], tmp_path, microbatch_size="auto")
    more = [one - other for one, other in zip(counts.row(), without("resnet8"), strict=True)]
    assert more[0] <= 3 and more[1:4] == [0, 0, 0] and more[4] <= 36


def test_operations_are_told_apart():
    counts = operations.Counts()
    x = torch.ones(4)
    with operations.Operations(counts), operations.Methods(counts):
        x.view(2, 2).t()  # a view
        torch.empty(3)  # memory alone
        _ = x + 1
        torch.tensor([1.0, 2.0])
        x[0].item()
    assert counts.operations == {"aten.add": 1} and counts.copies == {"pageable": 1} and counts.copied == 8
    assert set(counts.reads) == {"item", "aten._local_scalar_dense"}


class Peak(Callback):
    """The most bytes that live in each batch, and what lives of the last outputs when a forward pass begins."""

    def __init__(self, live: LiveBytes):
        self.live = live
        self.peaks: list[int] = []
        self.seen: list[bool] = []

    def init(self, state, logger):
        state.unwrapped_model.register_forward_pre_hook(
            lambda *_: self.seen.append(hasattr(state, "outputs") or hasattr(state, "loss"))
        )

    def batch_start(self, state, logger):
        self.live.peak = self.live.live
        if state.timestamp.batch:
            assert state.outputs.requires_grad and total_of(state.loss).requires_grad  # seen by hooks up to here

    def batch_end(self, state, logger):
        self.peaks.append(self.live.peak)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(50_000, (12, 17), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def make_gpt() -> GPT:
    return GPT(50_000, context=16, d_model=8, n_layers=2, n_heads=2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peak_by_hand(parts: int) -> int:
    """The most bytes that live in the last of three steps; no step's logits live until the next one has its own."""
    module = make_gpt()
    optimizer = sgd(module.parameters())

    def part(inputs: Tensor, targets: Tensor) -> None:
        logits = module(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 64
        loss.backward()

    inputs, targets = tokens()
    with LiveBytes() as live:
        for batch in range(3):
            optimizer.zero_grad()
            live.peak = live.live
            where = slice(4 * batch, 4 * batch + 4)
            for one, other in zip(inputs[where].chunk(parts), targets[where].chunk(parts), strict=True):
                part(one, other)
            optimizer.step()
    return live.peak


@pytest.mark.parametrize("parts", [1, 2])
def test_no_two_sets_of_logits_stand_at_once(parts: int, tmp_path: Path):
    with LiveBytes() as live:
        peak = Peak(live)
        loader = TensorLoader(*tokens(), batch_size=4, shuffle=False)
        model = LanguageModel(make_gpt())
        with Trainer(
            model=model,
            train_dataloader=loader,
            eval_dataloader=loader,
            optimizers=sgd,
            callbacks=[peak],
            grad_accum=parts,
            device="cpu",
            run_dir=tmp_path,
        ) as trainer:
            trainer.fit()
    assert peak.seen == [False] * len(peak.seen) and len(peak.seen) == 3 * parts + 3
    assert 0.95 < peak.peaks[-1] / peak_by_hand(parts) < 1.01


def test_memory_is_counted_until_its_last_reference_is_gone():
    with LiveBytes() as live:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp()  # saved for the backward pass, which alone keeps it
        z = y.sum()
        view = x.detach().view(10, 100)
        assert live.live == 8004
        del y
        assert live.live == 8004
        z.backward()
        assert live.live == 8004  # the gradient for the exponentials
        del x, z
        assert live.live == 4000
        del view
    assert live.live == 0 and live.peak == 12008


# What an algorithm adds to a step at most: operations, and tensors that cross from the host. Those that are for several
# networks are tried on the cheapest one.
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
# Values read in a step, and calls of Python functions in it, where more are needed than of others.
READS = {"InfoBatch": 3, "NaNGuard": 1, "StochasticDepth": 1}  # only the guard's is on the device
CALLS = {"ActivationCheckpointing": 2700}
MOST_CALLS = 300
NO_LIMIT = {"LowPrecisionGroupNorm": "is like LowPrecisionLayerNorm, and no network here has group norms"}
GIVEN = {**operations.GIVEN, "SqueezeExcite": {"min_channels": 16}, "Factorize": {"min_channels": 16}}
TASKS = {
    **operations.TASKS,
    "resnet8": replace(operations.TASKS["resnet18"], module=ResNet8, data=lambda: operations.make_images(1, 8, 8)),
}


def test_every_algorithm_has_a_limit():
    assert sorted({*LIMITS, *NO_LIMIT, *operations.LEFT_OUT} & {*algorithms.__all__}) == sorted(algorithms.__all__)


@functools.cache
def without(title: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return operations.with_trainer(TASKS[title], Path(folder)).row()


@pytest.mark.parametrize("name", LIMITS)
def test_an_algorithm_stays_within_its_limit(name: str, tmp_path: Path):
    title, most, copies = LIMITS[name]
    one = getattr(algorithms, name)(**GIVEN.get(name, {}))
    counts = operations.with_trainer(TASKS[title], tmp_path, algorithms=[one])
    more = [now - before for now, before in zip(counts.row(), without(title), strict=True)]
    assert more[0] <= most and more[1] <= copies
    assert more[3] <= READS.get(name, 0) and more[4] <= CALLS.get(name, MOST_CALLS)


def test_adaptive_clipping_takes_three_operations_a_parameter(tmp_path: Path):
    clipping = algorithms.GradientClipping("adaptive", 0.1)
    counts = operations.with_trainer(TASKS["gpt"], tmp_path, algorithms=[clipping])
    parameters = len([*operations.make_module(TASKS["gpt"]).parameters()])
    assert counts.row()[0] - without("gpt")[0] <= 3 * parameters + 6


def test_the_losses_of_all_samples_are_kept_without_a_read(tmp_path: Path):
    counts = operations.with_trainer(TASKS["mlp"], tmp_path, callbacks=[callbacks.SampleLedger()])
    more = [now - before for now, before in zip(counts.row(), without("mlp"), strict=True)]
    assert more[0] <= 21 and more[3] == 0


def test_all_callbacks_together_add_three_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    alone = {"SampleLedger"}  # keeps a loss for every sample, and has a limit of its own
    names = [name for name in callbacks.__all__ if name not in {*operations.LEFT_OUT, *alone}]
    made = [getattr(callbacks, name)(**GIVEN.get(name, {})) for name in names]
    counts = operations.with_trainer(TASKS["mlp"], tmp_path / "run", callbacks=made)
    more = [now - before for now, before in zip(counts.row(), without("mlp"), strict=True)]
    assert more[0] <= 3 and more[1:4] == [0, 0, 0]


FEW, MANY = 5, 50


ADDED: dict[str, dict[str, Any]] = {
    "EMA": {"algorithms": [lambda: algorithms.EMA("10ba")]},
    "OptimizerMonitor": {"callbacks": [lambda: callbacks.OptimizerMonitor(batch_log_interval=1)]},
    "StateDigest": {"callbacks": [lambda: callbacks.StateDigest("1ba")]},
}


class Vectors(nn.Module):
    def __init__(self, tensors: int):
        super().__init__()
        self.parts = nn.ParameterList(torch.full((3,), 0.1) for _ in range(tensors))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.stack([*self.parts]).sum(0)


class Calls(TorchDispatchMode):
    """Counts all operations of this thread, views too."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Watched(Callback):
    """Counts the operations of the last two of five batches."""

    def __init__(self):
        self.calls = Calls()

    def before_dataloader(self, state, logger):
        if state.timestamp.batch == 3:
            self.calls.__enter__()

    def epoch_end(self, state, logger):
        self.calls.__exit__(None, None, None)


def count_operations(tensors: int, run_dir: Path, added: dict[str, Any]) -> int:
    watched = Watched()
    made: dict[str, Any] = {key: [make() for make in kinds] for key, kinds in added.items()}
    with Trainer(
        model=ClassificationModel(Vectors(tensors), 3),
        train_dataloader=TensorLoader(torch.rand(10, 3), torch.arange(10) % 3, batch_size=2, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        max_duration="1ep",
        loggers=[callbacks.InMemoryLogger()],
        device="cpu",
        run_dir=run_dir,
        **{**made, "callbacks": [watched, *made.get("callbacks", [])]},
    ) as trainer:
        trainer.fit()
    return watched.calls.count


@pytest.mark.parametrize("name", ADDED)
def test_operations_do_not_grow_with_the_number_of_parameters(name: str, tmp_path: Path):
    few, many = (
        count_operations(tensors, tmp_path, ADDED[name]) - count_operations(tensors, tmp_path, {})
        for tensors in (FEW, MANY)
    )
    assert 0 < few == many
