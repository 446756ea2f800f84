"""The same classes work without any config, in Python and in notebooks.

What `fit` returns and shows, saving by hand, how a Trainer describes itself, and a notebook executed in a kernel.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import ClassificationModel, Trainer
from runner.callbacks import CheckpointSaver, ProgressBar
from runner.data import TensorLoader


def make_trainer(tmp_path: Path, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 4, generator=generator)
    loader = TensorLoader(images, (images.sum(1) > 0).long(), batch_size=8, shuffle=True)
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)), num_classes=2),
        "train_dataloader": loader,
        "eval_dataloader": loader,
        "optimizers": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        "max_duration": "3ep",
        "run_dir": tmp_path / "run",
        "device": "cpu",
    }
    return Trainer(**defaults | arguments)


def test_fit_returns_the_final_metrics(tmp_path: Path):
    saver = CheckpointSaver(monitor="MulticlassAccuracy")
    with make_trainer(tmp_path, callbacks=[saver]) as trainer:
        result = trainer.fit()
    assert {*result.metrics} == {"train/MulticlassAccuracy", "eval/MulticlassAccuracy", "eval/loss"}
    assert result.metrics["eval/loss"] == float(trainer.state.eval_metric_values["eval"]["loss"])
    assert result.run_dir == tmp_path / "run"
    assert result.best == saver.best_checkpoint and result.best is not None and result.best.is_dir()
    assert repr(result).startswith("FitResult(") and "eval/loss" in repr(result)


def test_a_result_keeps_its_values_while_training_goes_on(tmp_path: Path):
    with make_trainer(tmp_path) as trainer:
        first = trainer.fit()
        second = trainer.fit("2ep")
    assert first.best is None
    assert first.metrics["eval/loss"] > second.metrics["eval/loss"]


def test_a_checkpoint_saved_by_hand_is_resumed_to_the_bit(tmp_path: Path):
    with make_trainer(tmp_path) as whole:
        whole.fit()
    with make_trainer(tmp_path, max_duration="4ba") as first:
        first.fit()
        first.save_checkpoint(tmp_path / "by_hand")
    with make_trainer(tmp_path, resume_path=tmp_path / "by_hand") as second:
        second.fit()
    ours = second.state.unwrapped_model.state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in whole.state.unwrapped_model.state_dict().items())


def test_a_trainer_and_its_state_describe_themselves(tmp_path: Path):
    with make_trainer(tmp_path, callbacks={"saver": CheckpointSaver()}, max_duration="2ba") as trainer:
        trainer.fit()
        text = repr(trainer)
    assert (
        text == f"Trainer({trainer.state.describe()})" and repr(trainer.state) == f"State({trainer.state.describe()})"
    )
    assert "ClassificationModel(Sequential) of 58 parameters; at 2ba of 2ba; fp32 on cpu; Adam" in text
    assert "callbacks train_metrics, saver" in text and "\n" not in text


class Terminal(io.StringIO):
    """A standard output that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("watched", "arguments", "bars"),
    [
        (True, {}, 1),
        (False, {}, 0),
        (False, {"progress_bar": True}, 1),
        (True, {"progress_bar": False}, 0),
        (True, {"loggers": [ProgressBar()]}, 1),
        (True, {"callbacks": [ProgressBar()], "progress_bar": True}, 1),
    ],
)
def test_training_that_someone_watches_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: bool, arguments: dict[str, Any], bars: int
):
    output = Terminal() if watched else io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setenv("TERM", "xterm")
    with make_trainer(tmp_path, **arguments) as trainer:
        assert sum(isinstance(one, ProgressBar) for one in trainer.state.loggers) == bars
        trainer.fit()
    assert ("  3/3 " in output.getvalue()) == bool(bars)


CELLS = [
    """
import os, signal, threading, torch
from torch import nn
from runner import ClassificationModel, Trainer
from runner.callbacks import LearningCurves
from runner.data import TensorLoader

images = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
loader = TensorLoader(images, (images.sum(1) > 0).long(), batch_size=4, shuffle=True)
trainer = Trainer(
    model=ClassificationModel(nn.Linear(4, 2), num_classes=2),
    train_dataloader=loader,
    eval_dataloader=loader,
    optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    max_duration="3ep",
    loggers=[LearningCurves()],
)
trainer
""",
    "trainer.fit()",
    """
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
interrupted = trainer.fit("100000ep")
interrupted
""",
    """
at = trainer.state.timestamp.batch
again = trainer.fit("2ba")
print(trainer.state.timestamp.batch - at, trainer.state.error)
""",
    """
from runner.callbacks import SpeedMonitor
Trainer(model=trainer.state.unwrapped_model, callbacks=[SpeedMonitor])
""",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each cell shows."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one.strip()) for one in CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        book, timeout=240, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    nbformat.write(book, folder / "executed.ipynb")
    return [cell.outputs for cell in book.cells]


def texts(outputs: list[Any]) -> str:
    shown = (one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs)
    return "\n".join(shown)


@pytest.mark.slow
def test_a_cell_shows_what_a_trainer_is(outputs: list[list[Any]]):
    assert "Trainer(ClassificationModel(Linear) of 10 parameters; at 0ba of 3ep" in texts(outputs[0])


@pytest.mark.slow
def test_training_shows_a_line_an_epoch_the_curves_and_the_result(outputs: list[list[Any]], tmp_path: Path):
    shown = texts(outputs[1])
    assert [f"  {number}/3 " in shown for number in (1, 2, 3)] == [True] * 3
    assert "FitResult(train/MulticlassAccuracy" in shown
    pictures = [one["data"]["image/png"] for one in outputs[1] if "image/png" in one.get("data", {})]
    assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not any(one["output_type"] == "error" for one in outputs[1])


@pytest.mark.slow
def test_an_interrupted_cell_keeps_what_there_is_and_training_goes_on(outputs: list[list[Any]]):
    assert "FitResult(" in texts(outputs[2])
    assert not any(one["output_type"] == "error" for one in outputs[2])
    assert texts(outputs[3]).strip().splitlines()[-1].startswith("2 None")


@pytest.mark.slow
def test_a_class_in_place_of_an_object_is_named(outputs: list[list[Any]]):
    (error,) = [one for one in outputs[4] if one["output_type"] == "error"]
    assert error["ename"] == "TypeError"
    assert error["evalue"] == "callbacks=SpeedMonitor: this is a class; pass an instance, SpeedMonitor(...)"
