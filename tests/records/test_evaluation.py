"""The description of an evaluation: digests of data, size and metrics, which say if two runs can be compared."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from tiny_runs import tiny_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from runner import ClassificationModel, Evaluator
from runner.data import TensorLoader
from runner.records.evaluation import describe_evaluators
from runner.records.result import Result

TARGETS = torch.arange(12) % 2


class Read(Dataset[Any]):
    """A data set that makes its samples when they are read."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index + self.offset), TARGETS[index]


class Noisy(Read):
    """Samples with noise from each of the three generators: Python, NumPy and torch."""

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(3)
        return torch.full((3,), index + self.offset) + noise, TARGETS[index]


class Halved(torchmetrics.Metric):
    """A metric defined in this file."""

    def update(self, *batch: Any) -> None: ...

    def compute(self) -> torch.Tensor:
        return torch.tensor(0.5)


class OtherLoss(ClassificationModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return 2 * super().loss(outputs, batch)


def inputs() -> torch.Tensor:
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def in_memory(images: torch.Tensor) -> Any:
    return TensorLoader(images, TARGETS[: len(images)], batch_size=4, shuffle=False)


def describe(folder: Path, data: Any = None, kind: Any = ClassificationModel, subset: int | None = None) -> Any:
    """Train one batch, and return the recorded evaluation."""
    loader = in_memory(inputs()) if data is None else data
    with tiny_trainer(
        model=kind(nn.Linear(3, 2), 2),
        train_dataloader=in_memory(inputs()),
        eval_dataloader=Evaluator("eval", loader, subset_num_batches=subset),
        max_duration="1ba",
        run_dir=folder / "run",
    ) as trainer:
        trainer.fit()
        return describe_evaluators(trainer.state)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {key for key in before if before[key] != after[key]}


def test_the_description_does_not_depend_on_the_weights(tmp_path: Path):
    torch.manual_seed(0)
    first = describe(tmp_path / "a")
    torch.manual_seed(1)
    assert describe(tmp_path / "b") == first
    assert first["eval:size"] == "12"


def test_other_data_change_the_digest_in_memory_or_read(tmp_path: Path):
    assert changed(describe(tmp_path / "a"), describe(tmp_path / "b", in_memory(inputs() + 1))) == {"eval:data"}
    first, same, other = (
        describe(tmp_path / str(offset), DataLoader(Read(offset), batch_size=4)) for offset in (0.0, 0.0, 1.0)
    )
    assert first == same and changed(first, other) == {"eval:data"}


def test_noisy_data_have_one_digest_and_leave_the_generators_of_the_run_alone(tmp_path: Path):
    digests = set()
    for seed in (0, 1):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        loader = DataLoader(Noisy(), batch_size=4)
        with tiny_trainer(
            train_dataloader=in_memory(inputs()),
            eval_dataloader=loader,
            max_duration="1ba",
            run_dir=tmp_path / str(seed),
        ) as trainer:
            before = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
            evaluation = describe_evaluators(trainer.state)
            after = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
        assert after == before
        digests.add(evaluation["eval:data"])
    assert len(digests) == 1


def test_the_value_of_one_class_is_evaluated_by_its_metric():
    result = Result("FINISHED", "run", "", [], evaluation={"eval:data": "d", "eval:size": "12", "eval/F1": "c"})
    assert result.evaluated_by("eval/F1/class_3") == result.evaluated_by("eval/F1")
    assert result.evaluated_by("eval/F1") == {"data": "d", "size": "12", "metric's code": "c"}
    assert result.evaluated_by("loss")["metric's code"] is None


def test_fewer_samples_or_batches_change_the_size(tmp_path: Path):
    whole = describe(tmp_path / "a")
    assert changed(whole, describe(tmp_path / "b", in_memory(inputs()[:8]))) == {"eval:data", "eval:size"}
    assert changed(whole, describe(tmp_path / "c", subset=2)) == {"eval:size"}


def test_another_loss_metric_or_setting_of_a_metric_changes_its_digest(tmp_path: Path):
    assert changed(describe(tmp_path / "a"), describe(tmp_path / "b", kind=OtherLoss)) == {"eval/loss"}

    def with_metric(metric: torchmetrics.Metric) -> Any:
        return lambda module, classes: ClassificationModel(module, classes, metrics={"mine": metric})

    def describe_metric(name: str, metric: torchmetrics.Metric) -> Any:
        return describe(tmp_path / name, kind=with_metric(metric))

    top_1, top_2 = (MulticlassAccuracy(2, top_k=k) for k in (1, 2))
    assert changed(describe_metric("c", top_1), describe_metric("d", top_2)) == {"eval/mine"}
    assert changed(describe_metric("e", top_1), describe_metric("f", Halved())) == {"eval/mine"}


OWN_DATA = """
import pathlib, torch
from runner.data import TensorLoader

def load() -> tuple[TensorLoader, TensorLoader]:
    rows, offset = map(int, pathlib.Path("data.txt").read_text().split())
    tensors = offset + torch.ones(rows, 64), torch.zeros(rows).long()
    return tuple(TensorLoader(*tensors, batch_size=4, shuffle=False) for _ in range(2))
"""


@pytest.mark.parametrize(
    ("content", "warnings"),
    [
        ("8 1", ["the data of evaluator 'eval' has changed (different samples): "]),
        (
            "12 0",
            [
                "the training data has changed: 8 -> 12 samples",
                "the data of evaluator 'eval' has changed (8 -> 12 samples): ",
            ],
        ),
        ("8 0", []),
    ],
)
def test_a_run_whose_data_has_changed_says_so_when_it_is_resumed_or_evaluated(
    tmp_path: Path, run_here: Any, content: str, warnings: list[str]
):
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    (tmp_path / "data.txt").write_text("8 0")
    data = ("~data", "+data._target_=own_data.load", "algorithms=none", "callbacks=[checkpoint_saver]")
    run_here("model=mlp", *data, "trainer.max_duration=1ep", "hydra.run.dir=run", code=0)
    (tmp_path / "data.txt").write_text(content)
    for command, expected in (
        (["eval", "run"], warnings[-1:]),
        (["resume", "run", "trainer.max_duration=2ep"], warnings),
    ):
        found = [line for line in run_here(*command, code=0).err.splitlines() if line.startswith("WARNING: the ")]
        assert len(found) == len(expected), found
        assert all(line.startswith(f"WARNING: {start}") for line, start in zip(found, expected, strict=True)), found
