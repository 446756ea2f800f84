"""The same classes work without any config, in Python and in notebooks.

These tests cover what `fit` returns and shows, saving by hand, the `repr` of a Trainer, and an executed notebook.
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


@pytest.mark.parametrize("config", [None, {"model": "mine"}], ids=["no config", "a config to record"])
def test_fit_warns_if_the_last_loss_is_not_a_number(tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any):
    with make_trainer(tmp_path, config=config) as trainer:
        trainer.fit()
        assert not caplog.messages
        with torch.no_grad():
            next(trainer.state.unwrapped_model.parameters()).fill_(torch.nan)
        trainer.fit("1ba")
    assert [text.partition(":")[0] for text in caplog.messages] == ["the loss of the last batch is nan"]


def test_a_result_keeps_its_values_when_training_continues(tmp_path: Path):
    with make_trainer(tmp_path) as trainer:
        first = trainer.fit()
        second = trainer.fit("2ep")
    assert first.best is None
    assert first.metrics["eval/loss"] > second.metrics["eval/loss"]


def test_a_run_resumed_from_a_checkpoint_saved_by_hand_is_bit_identical(tmp_path: Path):
    with make_trainer(tmp_path) as whole:
        whole.fit()
    with make_trainer(tmp_path, max_duration="4ba") as first:
        first.fit()
        first.save_checkpoint(tmp_path / "by_hand")
    with make_trainer(tmp_path, resume_path=tmp_path / "by_hand") as second:
        second.fit()
    weights = second.state.unwrapped_model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in whole.state.unwrapped_model.state_dict().items())


def test_the_repr_of_a_trainer_and_of_its_state_describes_them(tmp_path: Path):
    with make_trainer(tmp_path, callbacks={"saver": CheckpointSaver()}, max_duration="2ba") as trainer:
        trainer.fit()
        text = repr(trainer)
    assert (
        text == f"Trainer({trainer.state.describe()})" and repr(trainer.state) == f"State({trainer.state.describe()})"
    )
    assert "ClassificationModel(Sequential) of 58 parameters; at 2ba of 2ba; fp32 on cpu; Adam" in text
    assert "callbacks train_metrics, saver" in text and "\n" not in text


class Terminal(io.StringIO):
    """A standard output that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("on_terminal", "arguments", "bars"),
    [
        (True, {}, 1),
        (False, {}, 0),
        (False, {"progress_bar": True}, 1),
        (True, {"progress_bar": False}, 0),
        (True, {"loggers": [ProgressBar()]}, 1),
        (True, {"callbacks": [ProgressBar()], "progress_bar": True}, 1),
    ],
)
def test_training_on_a_terminal_shows_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_terminal: bool, arguments: dict[str, Any], bars: int
):
    output = Terminal() if on_terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setenv("TERM", "xterm")
    with make_trainer(tmp_path, **arguments) as trainer:
        assert sum(isinstance(logger, ProgressBar) for logger in trainer.state.loggers) == bars
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
before = trainer.state.timestamp.batch
trainer.fit("2ba")
print(trainer.state.timestamp.batch - before, trainer.state.error)
""",
    """
from runner.callbacks import SpeedMonitor
Trainer(model=trainer.state.unwrapped_model, callbacks=[SpeedMonitor])
""",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The outputs of each cell of a notebook, executed in a kernel."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    nbformat.write(notebook, folder / "executed.ipynb")
    return [cell.outputs for cell in notebook.cells]


def text_of(outputs: list[Any]) -> str:
    """Return the text in the outputs of a cell."""
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def errors_of(outputs: list[Any]) -> list[Any]:
    """Return the outputs of a cell that are errors."""
    return [output for output in outputs if output["output_type"] == "error"]


@pytest.mark.slow
def test_a_cell_shows_the_repr_of_a_trainer(outputs: list[list[Any]]):
    assert "Trainer(ClassificationModel(Linear) of 10 parameters; at 0ba of 3ep" in text_of(outputs[0])


@pytest.mark.slow
def test_fit_in_a_cell_shows_a_line_per_epoch_the_curves_and_the_result(outputs: list[list[Any]]):
    text = text_of(outputs[1])
    assert [f"  {number}/3 " in text for number in (1, 2, 3)] == [True] * 3
    assert "FitResult(train/MulticlassAccuracy" in text
    pictures = [output["data"]["image/png"] for output in outputs[1] if "image/png" in output.get("data", {})]
    assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not errors_of(outputs[1])


@pytest.mark.slow
def test_an_interrupted_cell_returns_its_result_and_training_can_continue(outputs: list[list[Any]]):
    assert "FitResult(" in text_of(outputs[2])
    assert not errors_of(outputs[2])
    assert text_of(outputs[3]).strip().splitlines()[-1].startswith("2 None")


@pytest.mark.slow
def test_the_error_for_a_class_instead_of_an_instance_names_the_class(outputs: list[list[Any]]):
    (error,) = errors_of(outputs[4])
    assert error["ename"] == "TypeError"
    assert error["evalue"] == "callbacks=SpeedMonitor: this is a class; pass an instance, SpeedMonitor(...)"
