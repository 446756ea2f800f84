from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from observers import SaveAt
from planted_runs import NONSENSE, train_language
from rank_runs import program_of

from runner import Algorithm, Callback, ClassificationModel, Trainer, get_global_rank, save_checkpoint
from runner.algorithms import EMA, LAWA, SWA, NaNGuard, ScheduleFree, SpikeGuard
from runner.algorithms.spike_guard import deviations
from runner.callbacks import InMemoryLogger, ReplicaMonitor
from runner.data import TensorLoader
from runner.models.loss import total_of

GUARD: dict[str, Any] = {"window": 8, "interval": 4}


class Spoiler(Algorithm):
    """Multiplies the loss of chosen batches, counted from 0."""

    def __init__(self, *batches: int, by: float = 1000.0):
        self.batches, self.by = batches, by

    def after_loss(self, state: Any, logger):
        if state.timestamp.batch in self.batches:
            state.loss = state.loss * self.by


class Watch(Algorithm):
    """Stores weights, buffers, optimizer state and averages after each batch."""

    runs_after = ("SpikeGuard",)

    def __init__(self):
        self.after: dict[int, Any] = {}

    def batch_end(self, state, logger):
        parts = [
            state.unwrapped_model.state_dict(),
            [optimizer.state_dict()["state"] for optimizer in state.optimizers],
        ]
        kinds = (EMA, LAWA, SWA, ScheduleFree)
        parts += [algorithm.state_dict() for algorithm in state.algorithms if isinstance(algorithm, kinds)]
        self.after[state.timestamp.batch] = copy.deepcopy(parts)


def assert_equal(values: Any, expected: Any) -> None:
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def fit(
    make_trainer: Any, *algorithms: Algorithm, duration: str = "24ba", **arguments: Any
) -> tuple[dict[int, Any], InMemoryLogger]:
    watch, memory = Watch(), InMemoryLogger()
    options = {"max_duration": duration, "batch_norm": True, "loggers": [memory], **arguments}
    with make_trainer(*algorithms, watch, **options) as trainer:
        trainer.fit()
    return watch.after, memory


def test_deviations_are_robust_and_one_sided():
    history = torch.tensor([[1.0, 2.0, 3.0, 4.0, 500.0], [1.0, 1.0, 1.0, 1.0, 1.0]]).double()
    values = torch.tensor([[3.0, 3.0 + 1.4826, -50.0, torch.nan, 3.0], [1.0, 1.0, 1.0, 1.0, 1.5]]).double()
    # The medians are 3 and 1. Their median deviations are 1 and 0; instead of 0, 5 % of the median is used.
    torch.testing.assert_close(deviations(values, history), torch.tensor([0.0, 1.0, 0.0, torch.inf, 10.0]).double())
    assert deviations(torch.ones(2, 1).double(), torch.zeros(2, 8).double()).item() == 0  # zeros give no scale


def make_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


@pytest.mark.parametrize(
    "average",
    [
        None,
        EMA("4ba"),
        EMA("4ba", start="14ba"),
        SWA("0ba", "1dur", "1ba", bn_batches=0),
        LAWA(3, "1ba"),
        ScheduleFree(),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_everything_is_restored_after_a_spike(make_trainer, caplog, average: Algorithm | None):
    averages = [] if average is None else [average]
    after, memory = fit(make_trainer, SpikeGuard(**GUARD), *averages, Spoiler(13), optimizers=make_adam)
    assert_equal(after[16], after[12])  # batches 13 to 16 are checked together
    assert not torch.equal(after[17][0]["module.1.weight"], after[16][0]["module.1.weight"])
    assert [(at.batch, value) for at, value in memory.data["spike_guard/rollbacks"]] == [(16, 1.0)]
    ((first, last, worst, *_, back_to),) = memory.tables["spike_guard"]["rows"]
    assert (first, last, worst, back_to) == (13, 16, 14, 12)
    (message,) = [record.getMessage() for record in caplog.records if "spike" in record.getMessage()]
    assert message.startswith("batch 14 (counted from 1) is a spike: loss ")
    assert message.endswith("going back to the weights after batch 12, skipping batches 13 to 16")


def test_without_a_spike_nothing_changes(make_trainer):
    plain, _ = fit(make_trainer)
    guarded, memory = fit(make_trainer, SpikeGuard(**GUARD))
    assert_equal(guarded, plain)
    assert not memory.tables


def test_a_value_that_is_not_finite_is_a_spike_in_any_batch(make_trainer):
    after, _ = fit(make_trainer, SpikeGuard(**GUARD), Spoiler(0, 5, by=torch.nan), duration="12ba")
    plain, _ = fit(make_trainer, duration="1ba")
    assert after[1][0]["module.1.weight"].isnan().any()
    assert all(tensor.isfinite().all() for tensor in after[8][0].values())
    assert_equal(after[8][0]["module.1.weight"], after[4][0]["module.1.weight"])
    assert not torch.equal(plain[1][0]["module.1.weight"], after[8][0]["module.1.weight"])


def test_a_batch_skipped_by_nan_guard_is_not_a_spike(make_trainer):
    guard = SpikeGuard(**GUARD)
    _, memory = fit(make_trainer, guard, NaNGuard(), Spoiler(1, 13, by=torch.nan))
    assert memory.data["nan_guard/skipped"] and not memory.tables
    assert bool((guard.state_dict()["history"] > 0).all())


def test_batches_after_the_last_interval_are_checked_too(make_trainer):
    after, _ = fit(make_trainer, SpikeGuard(**GUARD), Spoiler(13), duration="14ba")
    assert_equal(after[14], after[12])


class StopAtEvent(Callback):
    """Stops training at an event once a batch is trained."""

    def __init__(self, event: str, batch: int):
        self.batch = batch
        setattr(self, event, self.stop)

    def stop(self, state: Any, logger: Any):
        if state.timestamp.batch >= self.batch:
            state.stop_training()


class FinalWeights(Callback):
    """Stores the weights that the last checkpoint of a batch or an epoch holds, and those at the end."""

    def batch_checkpoint(self, state: Any, logger: Any):
        self.saved = copy.deepcopy(state.unwrapped_model.state_dict())

    epoch_checkpoint = batch_checkpoint

    def fit_end(self, state: Any, logger: Any):
        self.last = copy.deepcopy(state.unwrapped_model.state_dict())


@pytest.mark.parametrize(
    ("duration", "event", "batch"),
    [
        ("5ep", "", 0),  # of 3 batches
        ("24ba", "batch_end", 14),
        ("24ba", "eval_end", 14),
        ("24ba", "batch_checkpoint", 14),
        ("24ba", "epoch_end", 15),
        ("24ba", "epoch_checkpoint", 15),
    ],
)
def test_final_weights_are_checked_however_training_ends(make_trainer, duration: str, event: str, batch: int):
    watch, memory, final = Watch(), InMemoryLogger(), FinalWeights()
    callbacks = [*([StopAtEvent(event, batch)] if event else []), final]
    options = {"max_duration": duration, "batch_norm": True, "loggers": [memory], "callbacks": callbacks}
    with make_trainer(SpikeGuard(**GUARD), Spoiler(13), watch, eval_interval="1ba", **options) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == (batch or 15)
    assert_equal(final.last, watch.after[12][0])
    if not event.endswith("_checkpoint"):  # a callback that stops there comes after the checkpoint of that batch
        assert_equal(final.saved, final.last)
    ((first, last, worst, *_),) = memory.tables["spike_guard"]["rows"]
    assert (first, last, worst) == (13, batch or 15, 14)


def test_a_prolonged_run_counts_a_spike_once(make_trainer):
    memory = InMemoryLogger()
    with make_trainer(SpikeGuard(**GUARD, limit=1), Spoiler(13), max_duration="14ba", loggers=[memory]) as trainer:
        trainer.fit()  # ends within the interval of the spike
        trainer.fit("10ba")
    ((first, last, worst, *_),) = memory.tables["spike_guard"]["rows"]
    assert (first, last, worst) == (13, 16, 14)


def test_one_spike_more_than_the_limit_ends_the_run(make_trainer):
    guard = SpikeGuard(**GUARD, limit=1)
    with (
        make_trainer(guard, Spoiler(13, 18), max_duration="24ba") as trainer,
        pytest.raises(
            FloatingPointError, match=r"batch 19 \(counted from 1\) is a spike.*gone back limit=1 times already"
        ),
    ):
        trainer.fit()


def test_a_resumed_run_goes_back_to_the_same_weights(make_trainer, tmp_path: Path):
    def algorithms() -> list[Algorithm]:
        return [SpikeGuard(**GUARD), EMA("4ba"), Spoiler(13, 18)]

    stops = (10, 14, 15, 17)
    whole, _ = fit(make_trainer, *algorithms(), callbacks=[SaveAt(tmp_path, *stops)])
    for stop in stops:
        resumed, memory = fit(make_trainer, *algorithms(), resume_path=tmp_path / str(stop))
        assert_equal(resumed, {batch: parts for batch, parts in whole.items() if batch > stop})
        assert len(memory.tables["spike_guard"]["rows"]) == 2


def test_another_interval_is_refused_on_resume(make_trainer, tmp_path: Path):
    with make_trainer(SpikeGuard()) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="interval=8: the checkpoint has interval=16"):
        make_trainer(SpikeGuard(interval=8), resume_path=tmp_path / "checkpoint")


def train_on_a_rank() -> None:
    """Train with a spike on rank 1, and save the detected spikes and the weights; resumes from the folder in argv."""

    class OnOneRank(Algorithm):
        def after_loss(self, state, logger):
            if state.timestamp.batch == 13 and get_global_rank() == 1:
                state.loss = total_of(state.loss) * 1000

    torch.manual_seed(0)
    guard = SpikeGuard(window=8, interval=4)
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Linear(4, 3)
    with Trainer(
        model=ClassificationModel(network, 3),
        train_dataloader=TensorLoader(
            torch.randn(24, 4, generator=generator), torch.arange(24) % 3, batch_size=6, shuffle=True
        ),
        optimizers=lambda params: torch.optim.Adam(params, lr=0.01),
        max_duration="22ba",
        algorithms=[guard, OnOneRank()],
        callbacks=[SaveAt(Path(), 15), ReplicaMonitor("1ba")],
        device="cpu",
        resume_path=sys.argv[1] or None,
    ) as trainer:
        trainer.fit()
        spikes = [row[:3] for row in guard.state_dict()["spikes"]]
        Path(f"{get_global_rank()}.json").write_text(json.dumps([spikes, network.weight.tolist()]))


@pytest.mark.slow
def test_a_spike_on_one_rank_rolls_back_all_ranks(run_ranks, tmp_path: Path):
    """Only the gradient shows a spike of rank 1. A resumed run goes back to the same weights."""
    run_ranks(program_of("algorithms/test_spike_guard", "train_on_a_rank"), 2, "")
    whole = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert whole[0] == whole[1] and whole[0][0] == [[13, 16, 14]]
    run_ranks(program_of("algorithms/test_spike_guard", "train_on_a_rank"), 2, "15")
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == whole


@pytest.mark.slow
def test_corrupt_data_do_not_harm_a_guarded_run():
    clean, _ = train_language(700, 0, range(0))
    spoilt, _ = train_language(700, 0, NONSENSE)
    guarded, spikes = train_language(700, 0, NONSENSE, SpikeGuard())
    assert spikes
    assert guarded < 1.01 * clean < 1.01 * spoilt / 1.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_run_on_clean_data_is_never_rolled_back(seed: int):
    assert train_language(250, seed, range(0), SpikeGuard())[1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 7}, "window=7"),
        ({"interval": 0}, "interval=0"),
        ({"threshold": 0}, "threshold=0"),
        ({"threshold": True}, "threshold=True"),
        ({"limit": 0}, "limit=0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SpikeGuard(**arguments)
