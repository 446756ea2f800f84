"""A notebook as its reader sees it: executed in a kernel, with what each cell shows."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

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


pytestmark = pytest.mark.slow


def test_a_trainer_describes_itself(outputs: list[list[Any]]):
    assert "Trainer(ClassificationModel(Linear) of 10 parameters; at 0ba of 3ep" in texts(outputs[0])


def test_training_shows_a_line_an_epoch_the_curves_and_the_result(outputs: list[list[Any]], tmp_path: Path):
    shown = texts(outputs[1])
    assert [f"  {number}/3 " in shown for number in (1, 2, 3)] == [True] * 3
    assert "FitResult(train/MulticlassAccuracy" in shown
    pictures = [one["data"]["image/png"] for one in outputs[1] if "image/png" in one.get("data", {})]
    assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not any(one["output_type"] == "error" for one in outputs[1])


def test_an_interrupted_cell_keeps_what_there_is_and_training_goes_on(outputs: list[list[Any]]):
    assert "FitResult(" in texts(outputs[2])
    assert not any(one["output_type"] == "error" for one in outputs[2])
    assert texts(outputs[3]).strip().splitlines()[-1].startswith("2 None")


def test_a_class_in_place_of_an_object_is_named(outputs: list[list[Any]]):
    (error,) = [one for one in outputs[4] if one["output_type"] == "error"]
    assert error["ename"] == "TypeError"
    assert error["evalue"] == "callbacks=SpeedMonitor: this is a class; pass an instance, SpeedMonitor(...)"
