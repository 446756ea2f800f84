from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
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
    """Samples that are made when they are asked for."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index + self.offset), TARGETS[index]


class Noisy(Read):
    """Samples with noise, drawn in all the ways there are."""

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(3)
        return torch.full((3,), index + self.offset) + noise, TARGETS[index]


class Halved(torchmetrics.Metric):
    """A metric whose code is here."""

    def update(self, *given: Any) -> None: ...

    def compute(self) -> torch.Tensor:
        return torch.tensor(0.5)


class OtherLoss(ClassificationModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return 2 * super().loss(outputs, batch)


def inputs() -> torch.Tensor:
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def held(images: torch.Tensor) -> Any:
    return TensorLoader(images, TARGETS[: len(images)], batch_size=4, shuffle=False)


def describe(folder: Path, data: Any = None, kind: Any = ClassificationModel, subset: int | None = None) -> Any:
    """The evaluation that a run of one batch records."""
    loader = held(inputs()) if data is None else data
    with tiny_trainer(
        model=kind(nn.Linear(3, 2), 2),
        train_dataloader=held(inputs()),
        eval_dataloader=Evaluator("eval", loader, subset_num_batches=subset),
        max_duration="1ba",
        run_dir=folder / "run",
    ) as trainer:
        trainer.fit()
        return describe_evaluators(trainer.state)


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def test_equal_evaluators_are_equal_whatever_the_weights(tmp_path: Path):
    torch.manual_seed(0)
    first = describe(tmp_path / "a")
    torch.manual_seed(1)
    assert describe(tmp_path / "b") == first
    assert first["eval:size"] == "12"


def test_other_data_are_found_in_memory_and_read(tmp_path: Path):
    assert changed(describe(tmp_path / "a"), describe(tmp_path / "b", held(inputs() + 1))) == {"eval:data"}
    found = [describe(tmp_path / str(at), DataLoader(Read(at), batch_size=4)) for at in (0.0, 0.0, 1.0)]
    assert found[0] == found[1] and changed(found[0], found[2]) == {"eval:data"}


def test_data_with_noise_are_equal_and_draw_from_no_generator_of_the_run(tmp_path: Path):
    digests = set()
    for seed in (0, 1):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        loader = DataLoader(Noisy(), batch_size=4)
        with tiny_trainer(
            train_dataloader=held(inputs()),
            eval_dataloader=loader,
            max_duration="1ba",
            run_dir=tmp_path / str(seed),
        ) as trainer:
            before = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
            found = describe_evaluators(trainer.state)
            after = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
        assert after == before
        digests.add(found["eval:data"])
    assert len(digests) == 1


def test_a_value_of_one_class_is_measured_by_its_metric():
    result = Result("FINISHED", "run", "", [], evaluation={"eval:data": "d", "eval:size": "12", "eval/F1": "c"})
    assert result.evaluated_by("eval/F1/class_3") == result.evaluated_by("eval/F1")
    assert result.evaluated_by("eval/F1") == {"data": "d", "size": "12", "metric's code": "c"}
    assert result.evaluated_by("loss")["metric's code"] is None


def test_fewer_samples_and_fewer_batches_are_another_size(tmp_path: Path):
    whole = describe(tmp_path / "a")
    assert changed(whole, describe(tmp_path / "b", held(inputs()[:8]))) == {"eval:data", "eval:size"}
    assert changed(whole, describe(tmp_path / "c", subset=2)) == {"eval:size"}


def test_another_loss_is_found_and_so_are_other_settings_of_a_metric(tmp_path: Path):
    assert changed(describe(tmp_path / "a"), describe(tmp_path / "b", kind=OtherLoss)) == {"eval/loss"}

    def with_metric(metric: torchmetrics.Metric) -> Any:
        return lambda module, classes: ClassificationModel(module, classes, metrics={"mine": metric})

    def find(name: str, metric: torchmetrics.Metric) -> Any:
        return describe(tmp_path / name, kind=with_metric(metric))

    top_1, top_2 = (MulticlassAccuracy(2, top_k=k) for k in (1, 2))
    assert changed(find("c", top_1), find("d", top_2)) == {"eval/mine"}
    assert changed(find("e", top_1), find("f", Halved())) == {"eval/mine"}
