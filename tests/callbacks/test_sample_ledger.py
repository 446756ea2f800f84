from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from planted_runs import flip_labels, keep_ledger
from tiers import fast
from torch import Tensor, nn

from runner import Callback, ClassificationModel, LanguageModel, Trainer
from runner.algorithms import InfoBatch, LabelSmoothing, MixUp, SeqLengthWarmup
from runner.callbacks import InMemoryLogger, SampleLedger
from runner.callbacks._sample_history import add_epoch, find_suspects, mean_losses, new_history
from runner.data import DatasetLoader, TensorLoader
from runner.models.sample_losses import worst_samples


def read(path: Path) -> dict[str, Tensor]:
    return {name: torch.tensor(column) for name, column in pyarrow.parquet.read_table(path).to_pydict().items()}


def make_data(samples: int = 22) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Linear(4, 3), 3),
        "train_dataloader": TensorLoader(*make_data(), batch_size=8, shuffle=True),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.5),
        "max_duration": "3ep",
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **arguments})


class Watch(Callback):
    """Computes what the ledger should record: the loss and prediction of each sample before each step."""

    def __init__(self):
        self.losses: list[Tensor] = []
        self.predictions: list[Tensor] = []

    def batch_start(self, state, logger):
        if state.timestamp.batch_in_epoch == 0:
            self.losses.append(torch.full((22,), torch.nan))
            self.predictions.append(torch.zeros(22, dtype=torch.int64))
        images, targets = make_data()
        loader: Any = state.train_dataloader
        indices = loader.order.indices(state.timestamp.epoch, state.timestamp.batch_in_epoch)
        with torch.no_grad():
            logits = state.unwrapped_model((images[indices], targets[indices]))
        self.losses[-1][indices] = F.cross_entropy(logits, targets[indices], reduction="none")
        self.predictions[-1][indices] = logits.argmax(dim=1)


@pytest.mark.parametrize(
    "arguments", [{}, {"grad_accum": 3}, {"algorithms": LabelSmoothing(0.2)}], ids=["plain", "microbatches", "smoothed"]
)
def test_each_epoch_has_the_loss_of_each_sample_before_its_step(tmp_path: Path, arguments: dict[str, Any]):
    watch = Watch()
    memory = InMemoryLogger()
    with make_trainer(tmp_path, watch, SampleLedger(0.25), loggers=[memory], **arguments) as trainer:
        trainer.fit()
    for number, (losses, predictions) in enumerate(zip(watch.losses, watch.predictions, strict=True)):
        epoch = read(tmp_path / "sample_ledger" / f"epoch-{number + 1:04}.parquet")
        assert epoch["sample"].tolist() == [*range(22)]
        torch.testing.assert_close(epoch["loss"], losses)
        assert torch.equal(epoch["prediction"], predictions)
    samples = read(tmp_path / "sample_ledger" / "samples.parquet")
    mean = torch.stack(watch.losses).mean(dim=0)
    torch.testing.assert_close(samples["mean_loss"].float(), mean)
    torch.testing.assert_close(samples["last_loss"], watch.losses[-1])
    assert torch.equal(samples["label"], make_data()[1])
    assert memory.artifacts == [(str(tmp_path / "sample_ledger" / "samples.parquet"), "sample_ledger")]
    table = memory.tables["sample_ledger"]
    assert table["columns"] == ["sample", "label", "prediction", "mean_loss", "last_loss", "learned", "forgotten"]
    assert [row[0] for row in table["rows"]] == mean.argsort(descending=True)[:6].tolist()


def test_the_ledger_does_not_change_training(tmp_path: Path):
    weights = []
    for callbacks in ([], [SampleLedger()]):
        torch.manual_seed(0)
        model = ClassificationModel(nn.Sequential(nn.Linear(4, 3), nn.Dropout()), 3)
        with make_trainer(tmp_path, *callbacks, model=model) as trainer:
            trainer.fit()
        weights.append(trainer.state.unwrapped_model.state_dict()["module.0.weight"])
    assert torch.equal(*weights)


def test_learned_is_the_first_correct_epoch_and_forgotten_counts_relapses():
    history = new_history(3)
    label = torch.tensor([1, 1, 1], dtype=torch.int32)
    for epoch, predictions in enumerate([[0, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 1]]):
        losses = torch.tensor([1.0, 2.0, 3.0 if epoch else torch.nan])
        seen = torch.tensor([True, True, epoch != 3])
        history = add_epoch(history, losses, torch.stack([torch.tensor(predictions).int(), label]), seen, epoch + 1)
    assert history["learned"].tolist() == [2, 1, 2]  # the first loss of the last sample is NaN, which does not count
    assert history["forgotten"].tolist() == [1, 2, 0]
    assert history["epochs"].tolist() == [4, 4, 2]
    assert mean_losses(history).tolist() == [1.0, 2.0, 3.0]
    assert find_suspects(history, 0.6).tolist() == [2, 1]


def test_worst_samples_have_the_highest_losses_and_nan_comes_first():
    assert worst_samples([1.0, math.nan, 3.0, math.inf, 3.0], 4).tolist() == [1, 3, 2, 4]
    assert worst_samples(torch.tensor([0.5, 2.0]), 8).tolist() == [1, 0]
    assert worst_samples([], 3).tolist() == []


def test_unseen_samples_are_not_suspects():
    seen = torch.tensor([True, False, True])
    history = add_epoch(new_history(3), torch.tensor([0.1, 0.0, 0.2]), None, seen, 1)
    assert find_suspects(history, 1.0).tolist() == [2, 0]


def test_most_wrong_labels_are_among_the_suspects(tmp_path: Path):
    """Of 5 % wrong labels, at least 80 % are among the 8 % suspects."""
    train, wrong = flip_labels(seed=0)
    images, labels = train.tensors
    memory = keep_ledger(train, seed=0, run_dir=tmp_path)
    suspects = [row[0] for row in memory.tables["sample_ledger"]["rows"]]
    assert len(suspects) == round(0.08 * len(labels))
    assert len({*suspects} & {*wrong.tolist()}) >= 0.8 * len(wrong)
    (logged,) = memory.images["sample_ledger/suspects"]
    first = suspects[0]
    assert logged["images"].shape == (16, 8, 8, 1)
    assert logged["captions"][0].startswith(f"sample {first}: label {int(labels[first])}, prediction ")
    shown = images[first, 0] - images[first].min()
    torch.testing.assert_close(
        torch.tensor(logged["images"][0, ..., 0] / 255.0).float(), shown / shown.max(), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("workers", fast([False, True], False))
def test_samples_of_tokens_are_shown_as_texts(tmp_path: Path, workers: bool):
    tokens = torch.tensor([[*f"text {number}".encode()] for number in range(8)])
    tensors = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    memory = InMemoryLogger()
    loader: Any = TensorLoader(*tensors, batch_size=4, shuffle=True)
    if workers:
        loader = DatasetLoader([*zip(*tensors, strict=True)], batch_size=4, shuffle=True, num_workers=1)
    model = LanguageModel(nn.Sequential(nn.Embedding(128, 4), nn.Linear(4, 128)))
    with make_trainer(
        tmp_path, SampleLedger(0.5, num_shown=2), model=model, train_dataloader=loader, loggers=[memory]
    ) as trainer:
        trainer.fit()
    table = memory.tables["sample_ledger"]
    assert table["columns"] == ["sample", "mean_loss", "last_loss", "text"]
    assert [row[3] for row in table["rows"]] == [*(f"text {row[0]}"[:-1] for row in table["rows"][:2]), "", ""]


def test_a_run_that_ends_inside_an_epoch_records_that_part_and_continues(tmp_path: Path):
    ledger = SampleLedger()
    with make_trainer(tmp_path / "cut", ledger, max_duration="2ba") as trainer:
        trainer.fit()
        assert len(read(tmp_path / "cut" / "sample_ledger" / "epoch-0001.parquet")["sample"]) == 16
        trainer.fit(duration="7ba")
    with make_trainer(tmp_path / "whole", SampleLedger()) as trainer:
        trainer.fit()
    cut, whole = (read(tmp_path / name / "sample_ledger" / "samples.parquet") for name in ("cut", "whole"))
    assert cut.keys() == whole.keys() and all(
        torch.equal(cut[name], whole[name]) for name in cut if cut[name].isfinite().all()
    )


def test_the_ledger_does_not_depend_on_ranks_or_a_resume_inside_an_epoch(
    tmp_path: Path, run_ranks, monkeypatch: pytest.MonkeyPatch
):
    def program() -> None:
        import sys

        import torch
        from torch import nn

        from runner import ClassificationModel, Trainer, save_checkpoint
        from runner.callbacks import SampleLedger
        from runner.data import TensorLoader

        folder, duration, load, save = sys.argv[1:]
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(17, 4, generator=generator, dtype=torch.float64), torch.arange(17) % 3
        torch.manual_seed(0)
        with Trainer(
            model=ClassificationModel(nn.Linear(4, 3, dtype=torch.float64), 3),
            train_dataloader=TensorLoader(*data, batch_size=4, shuffle=True),  # the last batch has one sample
            optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
            max_duration=duration,
            callbacks=[SampleLedger()],
            device="cpu",
            run_dir=folder,
            resume_path=load or None,
        ) as trainer:
            trainer.fit()
            if save:
                save_checkpoint(trainer.state, save)

    def train(ranks: int, *arguments: str) -> None:
        if ranks > 1:
            run_ranks(program, ranks, *arguments)
        else:
            monkeypatch.setattr(sys, "argv", ["", *arguments])
            program()

    monkeypatch.chdir(tmp_path)
    train(1, "whole", "3ep", "", "")
    for ranks in (1, 2):
        train(ranks, f"cut-{ranks}", "8ba", "", f"checkpoint-{ranks}")
    for first, second in ((2, 2), (2, 1), (1, 2)):
        train(second, f"{first}-{second}", "3ep", f"checkpoint-{first}", "")
        for file in ("epoch-0002", "epoch-0003", "samples"):
            whole, resumed = (
                read(Path(run, "sample_ledger", f"{file}.parquet")) for run in ("whole", f"{first}-{second}")
            )
            assert whole.keys() == resumed.keys()
            for column in whole:
                torch.testing.assert_close(resumed[column], whole[column])


PLAIN = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*make_data()), batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_dataloader": PLAIN}, r"the train dataloader \(DataLoader\) has no `order`: use one of runner.data"),
        ({"algorithms": MixUp()}, "MixUp blends samples"),
        ({"algorithms": InfoBatch()}, "InfoBatch leaves out samples"),
    ],
)
def test_runs_without_a_loss_per_sample_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str):
    with make_trainer(tmp_path, SampleLedger(), **arguments) as trainer, pytest.raises(ValueError, match=message):
        trainer.fit()


def test_a_batch_with_more_rows_than_samples_is_refused(tmp_path: Path):
    tokens = torch.arange(64).reshape(4, 16) % 8
    arguments: dict[str, Any] = {
        "model": LanguageModel(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))),
        "train_dataloader": TensorLoader(tokens, tokens, batch_size=2, shuffle=True),
        "algorithms": SeqLengthWarmup(min_seq_length=4, max_seq_length=16, step_size=4, truncate=False),
    }
    with (
        make_trainer(tmp_path, SampleLedger(), **arguments) as trainer,
        pytest.raises(ValueError, match="the batch has 8 samples instead of 2"),
    ):
        trainer.fit()


def test_a_ledger_of_another_number_of_samples_is_refused(tmp_path: Path):
    with make_trainer(tmp_path, SampleLedger()) as trainer:
        trainer.fit()
        saved = trainer.state.callbacks[-1].state_dict()
    ledger = SampleLedger()
    ledger.load_state_dict(saved)
    loader = TensorLoader(*make_data(21), batch_size=8, shuffle=True)
    with (
        make_trainer(tmp_path, ledger, train_dataloader=loader) as trainer,
        pytest.raises(ValueError, match="losses of 22 samples, but the data have 21"),
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suspects": 0}, "suspects=0: must be a share"),
        ({"suspects": 1.5}, "suspects=1.5: must be a share"),
        ({"suspects": True}, "suspects=True: must be a share"),
        ({"num_shown": -1}, "num_shown=-1"),
        ({"tokenizer": 3}, "tokenizer=3: must have encode"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SampleLedger(**arguments)
