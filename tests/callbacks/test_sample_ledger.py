from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from planted_runs import flip_labels, keep_ledger
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
    """Computes the loss and the prediction of each sample before each step, as the ledger should."""

    def __init__(self):
        self.losses: list[Tensor] = []
        self.predictions: list[Tensor] = []

    def batch_start(self, state, logger):
        if state.timestamp.batch_in_epoch == 0:
            self.losses.append(torch.full((22,), torch.nan))
            self.predictions.append(torch.zeros(22, dtype=torch.int64))
        images, targets = make_data()
        loader: Any = state.train_dataloader
        mine = loader.order.indices(state.timestamp.epoch, state.timestamp.batch_in_epoch)
        with torch.no_grad():
            logits = state.unwrapped_model((images[mine], targets[mine]))
        self.losses[-1][mine] = F.cross_entropy(logits, targets[mine], reduction="none")
        self.predictions[-1][mine] = logits.argmax(dim=1)


@pytest.mark.parametrize(
    "arguments", [{}, {"grad_accum": 3}, {"algorithms": LabelSmoothing(0.2)}], ids=["plain", "microbatches", "smoothed"]
)
def test_every_epoch_has_the_loss_of_every_sample_before_its_step(tmp_path: Path, arguments: dict[str, Any]):
    watch = Watch()
    memory = InMemoryLogger()
    with make_trainer(tmp_path, watch, SampleLedger(0.25), loggers=[memory], **arguments) as trainer:
        trainer.fit()
    for number, (losses, predictions) in enumerate(zip(watch.losses, watch.predictions, strict=True)):
        found = read(tmp_path / "sample_ledger" / f"epoch-{number + 1:04}.parquet")
        assert found["sample"].tolist() == [*range(22)]
        torch.testing.assert_close(found["loss"], losses)
        assert torch.equal(found["prediction"], predictions)
    found = read(tmp_path / "sample_ledger" / "samples.parquet")
    mean = torch.stack(watch.losses).mean(dim=0)
    torch.testing.assert_close(found["mean_loss"].float(), mean)
    torch.testing.assert_close(found["last_loss"], watch.losses[-1])
    assert torch.equal(found["label"], make_data()[1])
    assert memory.artifacts == [(str(tmp_path / "sample_ledger" / "samples.parquet"), "sample_ledger")]
    table = memory.tables["sample_ledger"]
    assert table["columns"] == ["sample", "label", "prediction", "mean_loss", "last_loss", "learned", "forgotten"]
    assert [row[0] for row in table["rows"]] == mean.argsort(descending=True)[:6].tolist()


def test_the_ledger_changes_no_number(tmp_path: Path):
    weights = []
    for callbacks in ([], [SampleLedger()]):
        with make_trainer(
            tmp_path, *callbacks, model=ClassificationModel(nn.Sequential(nn.Linear(4, 3), nn.Dropout()), 3)
        ) as trainer:
            trainer.fit()
        weights.append(trainer.state.unwrapped_model.state_dict()["module.0.weight"])
    assert torch.equal(*weights)


def test_learned_is_the_first_right_epoch_and_forgotten_counts_each_loss_of_it():
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


def test_samples_never_seen_are_no_suspects():
    seen = torch.tensor([True, False, True])
    history = add_epoch(new_history(3), torch.tensor([0.1, 0.0, 0.2]), None, seen, 1)
    assert find_suspects(history, 1.0).tolist() == [2, 0]


def test_wrong_labels_are_named(tmp_path: Path):
    """Of 5 % wrong labels, at least 80 % are among the 8 % suspects."""
    train, wrong = flip_labels(seed=0)
    images, labels = train.tensors
    memory = keep_ledger(train, seed=0, run_dir=tmp_path)
    named = [row[0] for row in memory.tables["sample_ledger"]["rows"]]
    assert len(named) == round(0.08 * len(labels))
    assert len({*named} & {*wrong.tolist()}) >= 0.8 * len(wrong)
    (logged,) = memory.images["sample_ledger/suspects"]
    first = named[0]
    assert logged["images"].shape == (16, 8, 8, 1)
    assert logged["captions"][0].startswith(f"sample {first}: label {int(labels[first])}, prediction ")
    shown = images[first, 0] - images[first].min()
    torch.testing.assert_close(
        torch.tensor(logged["images"][0, ..., 0] / 255.0).float(), shown / shown.max(), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("workers", [False, True])
def test_texts_are_shown_as_texts(tmp_path: Path, workers: bool):
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


def test_a_run_that_ends_within_an_epoch_counts_what_it_saw_and_goes_on(tmp_path: Path):
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


def test_ranks_and_a_resume_within_an_epoch_give_the_same_ledger(tmp_path: Path, run_ranks):
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

    run_ranks(program, 1, "whole", "3ep", "", "")
    for ranks in ((2, 2), (2, 1), (1, 2)):
        name = f"{ranks[0]}-{ranks[1]}"
        run_ranks(program, ranks[0], f"{name}-cut", "8ba", "", name)
        run_ranks(program, ranks[1], f"{name}-on", "3ep", name, "")
        for file in ("epoch-0002", "epoch-0003", "samples"):
            whole, found = (
                read(tmp_path / folder / "sample_ledger" / f"{file}.parquet") for folder in ("whole", f"{name}-on")
            )
            assert whole.keys() == found.keys()
            for column in whole:
                torch.testing.assert_close(found[column], whole[column])


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


def test_batches_of_other_samples_are_refused(tmp_path: Path):
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


def test_other_data_are_refused(tmp_path: Path):
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
