from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer, first_difference, save_checkpoint
from runner.algorithms import EMA, BatchAugment, MixUp
from runner.callbacks import CheckpointSaver, JSONLinesLogger, StateDigest
from runner.checkpoints.digest import DIGESTS, PARTS, read_digests
from runner.data import TensorLoader

BATCHES = 5  # per epoch: 38 samples in batches of 8


class Model(ClassificationModel):
    """Has dropout and batch norm, and fixed initial weights."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 3)]
            super().__init__(nn.Sequential(*layers), 3)


class SaveEach(Callback):
    """Saves a checkpoint after each batch."""

    def __init__(self, folder: Path):
        self.folder = folder

    def batch_checkpoint(self, state, logger):
        save_checkpoint(state, self.folder / f"ba{state.timestamp.batch}")


def make_data(**changes: Any) -> TensorLoader:
    generator = torch.Generator().manual_seed(3)
    images, targets = torch.randn(38, 1, 4, 4, generator=generator), torch.arange(38) % 3
    return TensorLoader(images, targets, **{"batch_size": 8, "shuffle": True, "seed": 1, **changes})


def make_trainer(run_dir: Path, *callbacks: Callback, interval: str | int = "1ba", **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": Model(),
        "train_dataloader": make_data(),
        "eval_dataloader": make_data(shuffle=False),
        "eval_interval": "2ba",
        "optimizers": lambda params: torch.optim.AdamW(params, lr=0.05),
        "schedulers": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2),
        "algorithms": [MixUp(alpha=0.5), EMA("4ba"), BatchAugment(pad=1, flip="random")],
        "callbacks": [StateDigest(interval), *callbacks],
        "max_duration": "2ep",
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(**(defaults | arguments))


def fit(run_dir: Path, *callbacks: Callback, **arguments: Any) -> bytes:
    """Train, and return the content of the run's file."""
    with make_trainer(run_dir, *callbacks, **arguments) as trainer:
        trainer.fit()
    return (run_dir / DIGESTS).read_bytes()


def test_equal_runs_write_equal_files(tmp_path: Path):
    written = fit(tmp_path / "a")
    assert fit(tmp_path / "b") == written
    lines = read_digests(tmp_path / "a")
    assert [(line["epoch"], line["batch"]) for line in lines] == [(n // BATCHES, n + 1) for n in range(2 * BATCHES)]
    for part in PARTS:
        assert len({line[part] for line in lines}) == len(lines), part  # differs after each batch


def test_the_first_difference_names_the_batch_and_the_parts(tmp_path: Path):
    class Nudge(Callback):
        """Moves a weight before the fifth batch is trained."""

        def batch_start(self, state, logger):
            if state.timestamp.batch == 4:
                next(state.unwrapped_model.parameters()).detach()[0, 0] += 1e-3

    fit(tmp_path / "a")
    fit(tmp_path / "seed", seed=1)
    fit(tmp_path / "order", train_dataloader=make_data(seed=2))
    fit(tmp_path / "nudge", Nudge())
    assert first_difference(tmp_path / "a", tmp_path / "seed") == (0, 1, PARTS[1:])  # the data has its own seed
    agreed, batch, parts = first_difference(tmp_path / "a", tmp_path / "order")
    assert (agreed, batch) == (0, 1)
    assert set(parts) == {*PARTS} - {"randomness"}  # dropout draws the same number of values
    agreed, batch, parts = first_difference(tmp_path / "a", tmp_path / "nudge")
    assert (agreed, batch) == (4, 5)
    assert "weights" in parts and not {"samples", "content", "randomness"} & set(parts)


def test_a_run_resumed_after_any_batch_writes_the_file_of_an_uninterrupted_run(tmp_path: Path):
    written = fit(tmp_path / "whole", SaveEach(tmp_path))
    for batch in range(1, 2 * BATCHES):
        run_dir = tmp_path / f"from{batch}"
        run_dir.mkdir()
        # As after a kill: lines of batches since the checkpoint, and a truncated line.
        (run_dir / DIGESTS).write_bytes(written + b'{"epoch":1,"batch":11,"wei')
        assert fit(run_dir, resume_path=tmp_path / f"ba{batch}") == written, batch


def test_a_second_fit_continues_the_file(tmp_path: Path):
    with make_trainer(tmp_path / "twice") as trainer:
        trainer.fit("7ba")
        trainer.fit("3ba")
    assert (tmp_path / "twice" / DIGESTS).read_bytes() == fit(tmp_path / "once")


def test_the_digest_of_samples_does_not_depend_on_the_number_of_ranks(run_ranks, tmp_path: Path):
    def program():
        import sys

        import torch

        from runner import ClassificationModel, Trainer
        from runner.callbacks import StateDigest
        from runner.data import DatasetLoader, TensorLoader

        torch.manual_seed(0)
        data = torch.randn(11, 4), torch.arange(11) % 3  # the last batch has 3 samples
        for name, loader in {
            "tensors": TensorLoader(*data, batch_size=4, shuffle=True),
            "dataset": DatasetLoader([*zip(*data, strict=True)], batch_size=4, shuffle=True),
        }.items():
            with Trainer(
                model=ClassificationModel(torch.nn.Linear(4, 3), 3),
                train_dataloader=loader,
                optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
                max_duration="2ep",
                device="cpu",
                run_dir=f"{name}{sys.argv[1]}",
                callbacks=[StateDigest("1ba")],
            ) as trainer:
                trainer.fit()

    for world_size in (1, 2):
        run_ranks(program, world_size, str(world_size))
    assert first_difference(tmp_path / "tensors1", tmp_path / "dataset1", ["samples", "content"]) == (6, None, ())
    for name in ("tensors", "dataset"):
        assert len(read_digests(tmp_path / f"{name}2")) == 6
        assert first_difference(tmp_path / f"{name}1", tmp_path / f"{name}2", ["samples"]) == (6, None, ())
        assert first_difference(tmp_path / f"{name}1", tmp_path / f"{name}2", ["content"]) == (0, 1, ("content",))


def test_the_digest_of_samples_is_a_hash_of_the_delivered_indices(tmp_path: Path):
    class Delivered(Callback):
        """Lists the indices of the delivered samples, which are their pixels here."""

        def __init__(self):
            self.ids: list[torch.Tensor] = []

        def after_dataloader(self, state, logger):
            self.ids.append(state.batch[0][:, 0, 0, 0].long())

    numbers = torch.arange(38.0).reshape(38, 1, 1, 1).expand(38, 1, 4, 4).contiguous()
    loader = TensorLoader(numbers, torch.arange(38) % 3, batch_size=8, shuffle=True)
    delivered = Delivered()
    fit(tmp_path, delivered, train_dataloader=loader, algorithms=[])
    expected, epochs = [], ""
    for batch in range(len(delivered.ids)):
        ids = torch.cat(delivered.ids[batch - batch % BATCHES : batch + 1])
        expected.append(hashlib.blake2b(epochs.encode() + ids.numpy().tobytes(), digest_size=16).hexdigest())
        if len(expected) % BATCHES == 0:
            epochs = expected[-1]
    assert [line["samples"] for line in read_digests(tmp_path)] == expected


def test_a_wider_interval_leaves_lines_out_and_changes_none(tmp_path: Path):
    for interval in ("1ba", "3ba"):
        fit(tmp_path / interval, interval=interval)
    each, third = ({line["batch"]: line for line in read_digests(tmp_path / name)} for name in ("1ba", "3ba"))
    assert list(third) == [3, 6, 9, 10]
    assert all(each[batch] == line for batch, line in third.items())


@pytest.mark.parametrize("end", ["2ep", "10ba", "74sp"])
def test_the_last_batch_has_a_line_at_any_interval(tmp_path: Path, end: str):
    fit(tmp_path, interval="100ba", max_duration=end)
    fit(tmp_path / "each")
    assert [line["batch"] for line in read_digests(tmp_path)] == [2 * BATCHES]
    assert first_difference(tmp_path, tmp_path / "each") == (2 * BATCHES, None, ())


def test_an_extended_run_keeps_the_line_of_its_earlier_end(tmp_path: Path):
    with make_trainer(tmp_path, CheckpointSaver(), interval="3ba", max_duration="4ba") as trainer:
        trainer.fit()
    fit(tmp_path, CheckpointSaver(), interval="3ba", resume_path=tmp_path)
    fit(tmp_path / "each")
    assert [line["batch"] for line in read_digests(tmp_path)] == [3, 4, 6, 9, 10]
    assert first_difference(tmp_path, tmp_path / "each") == (10, None, ())


def test_a_run_stopped_before_its_first_line_gives_a_warning(tmp_path: Path, caplog):
    class Stop(Callback):
        def batch_end(self, state, logger):
            state.stop_training()

    for interval, messages in (("100ba", 1), ("1ba", 0), (0, 0)):
        caplog.clear()
        with make_trainer(tmp_path / str(interval), Stop(), interval=interval) as trainer:
            trainer.fit()
        assert len(caplog.messages) == messages
        if messages:
            assert "interval='100ba': no digests, as training ended after batch 1" in caplog.messages[0]


def test_without_an_order_lines_have_content_but_no_samples(tmp_path: Path):
    images, targets = make_data().tensors
    batches = [*zip(images.split(8), targets.split(8), strict=True)]
    fit(tmp_path / "a", train_dataloader=batches)
    fit(tmp_path / "b", train_dataloader=[batches[0], batches[2], batches[1], *batches[3:]])
    assert all("samples" not in line for line in read_digests(tmp_path / "a"))
    agreed, batch, parts = first_difference(tmp_path / "a", tmp_path / "b")
    assert (agreed, batch) == (1, 2) and "content" in parts


def test_digests_do_not_change_training(tmp_path: Path):
    trainers = [make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b", callbacks=[])]
    for trainer in trainers:
        with trainer:
            trainer.fit()
    a, b = ({**trainer.state.unwrapped_model.state_dict()} for trainer in trainers)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not (tmp_path / "b" / DIGESTS).exists()


def test_the_file_is_an_artifact_even_of_a_failed_run(tmp_path: Path):
    class Fail(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == 3:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(tmp_path / "failed", Fail(), loggers=[JSONLinesLogger()])
    fit(tmp_path / "whole", loggers=[JSONLinesLogger()])
    for name, batches in (("failed", 3), ("whole", 2 * BATCHES)):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["artifact"] for line in lines if "artifact" in line] == [str(tmp_path / name / DIGESTS)]
        assert len(read_digests(tmp_path / name)) == batches


def test_interval_0_writes_no_file(tmp_path: Path):
    with make_trainer(tmp_path, CheckpointSaver(), interval=0) as trainer:
        trainer.fit()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_gives_one_warning(tmp_path: Path, caplog):
    class Fill(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 0:
                os.symlink("/dev/full", tmp_path / DIGESTS)

    with caplog.at_level(logging.WARNING), make_trainer(tmp_path, Fill()) as trainer:
        trainer.fit()
        os.unlink(tmp_path / DIGESTS)  # before it is read as an artifact
    assert trainer.state.timestamp.batch == 2 * BATCHES
    (record,) = caplog.records
    assert os.strerror(errno.ENOSPC) in record.getMessage() and DIGESTS in record.getMessage()


@pytest.mark.parametrize("interval", ["1ep", 1, "8sp", "0.5dur", "90s"])
def test_an_interval_that_may_end_between_batches_is_refused(interval: Any):
    with pytest.raises(ValueError, match=r"interval='.*': must be in batches, such as '100ba'"):
        StateDigest(interval)
