"""A run begins with its first batch: an error in it is one message, and leaves nothing behind."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import stores
from main_runs import run_folders
from tiers import fast
from torch import nn
from torch.nn import functional

from runner import Algorithm, Callback, ClassificationModel
from runner.data import DatasetLoader, TensorLoader

SHORT = ("trainer.max_duration=2ba", "algorithms=none", "callbacks=[mlflow_logger,checkpoint_saver,json_lines_logger]")
OWN_MODEL = ("~model.num_classes", "~model.module")


class OwnModel(ClassificationModel):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), num_classes=10)


class VectorLoss(OwnModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return functional.cross_entropy(outputs, batch[1], reduction="none")


class TextLoss(OwnModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return "loss"


class DetachedLoss(OwnModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return super().loss(outputs, batch).detach()


class NoOutputs(OwnModel):
    def forward(self, batch: Any) -> Any:
        return None


class NarrowInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(60, 10)

    def forward(self, images: Any) -> Any:
        return self.layer(images.flatten(1))


class FiveClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 5)

    def forward(self, images: Any) -> Any:
        return self.layer(images.flatten(1))


class Raises(Callback):
    def __init__(self, batch: int = 0) -> None:
        self.batch = batch

    def batch_start(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == self.batch:
            self.fail()

    def fail(self) -> None:
        raise KeyError("wrong")


class RaisesOnRank1(Callback):
    def batch_start(self, state: Any, logger: Any) -> None:
        import os

        if os.environ.get("RANK") == "1":
            raise ValueError("only on rank 1")


class CutsOutputs(Algorithm):
    def before_loss(self, state: Any, logger: Any) -> None:
        state.outputs = state.outputs[:3]


class Logs(Callback):
    """Logs a number and an image before the first batch is trained."""

    def fit_start(self, state: Any, logger: Any) -> None:
        import numpy

        logger.log_metrics({"early": 1.0})
        logger.log_images(numpy.zeros((1, 2, 2, 3), "uint8"), "early_image")
        logger.flush()


def load_texts() -> Any:
    samples = [(str(index), index % 10) for index in range(32)]
    return DatasetLoader(samples, batch_size=8, shuffle=False), None  # type: ignore[arg-type]


def load_broken() -> Any:
    import torch

    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            raise LookupError("no such sample")

    return DatasetLoader(Broken(), batch_size=8, shuffle=False), None


def load_wide() -> Any:
    import torch

    loader = TensorLoader(torch.zeros(32, 3, 8, 8), torch.zeros(32, dtype=torch.int64), batch_size=8, shuffle=False)
    return loader, loader


MODELS = (OwnModel, VectorLoss, TextLoss, DetachedLoss, NoOutputs, NarrowInput, FiveClasses)
PARTS = (*MODELS, Raises, RaisesOnRank1, CutsOutputs, Logs, load_texts, load_broken, load_wide)
OWN = f"""
from typing import Any

from torch import nn
from torch.nn import functional

from runner import Algorithm, Callback, ClassificationModel
from runner.data import DatasetLoader, TensorLoader

{"".join(inspect.getsource(part) for part in PARTS)}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def module(name: str) -> tuple[str, ...]:
    keys = ("in_channels", "num_classes", "width")
    return f"model.module._target_=own.{name}", *(f"~model.module.{key}" for key in keys)


def model(name: str) -> tuple[str, ...]:
    return f"model._target_=own.{name}", *OWN_MODEL


def data(name: str) -> tuple[str, ...]:
    return "~data", f"+data._target_=own.{name}"


WRONG = {
    "a loss that is a vector": (model("VectorLoss"), ["VectorLoss.loss returned a loss of shape (64,)"]),
    "a loss that is text": (model("TextLoss"), ["TextLoss.loss returned a loss of type str"]),
    "a loss without a gradient": (model("DetachedLoss"), ["DetachedLoss.loss", "without a gradient"]),
    "outputs that are None": (
        model("NoOutputs"),
        ["model._target_=own.NoOutputs does not fit data=digits. In its loss", "not NoneType"],
    ),
    "a wrong shape": (
        module("NarrowInput"),
        ["model=resnet8 does not fit data=digits. In its forward pass", "float32 (64, 1, 8, 8)", "own.py:"],
    ),
    "a label out of range": (module("FiveClasses"), ["model=resnet8 does not fit data=digits. In its loss", "to 9"]),
    "data of another shape": (data("load_wide"), ["does not fit data._target_=own.load_wide"]),
    "texts": (data("load_texts"), ["str", "tuple of 8 str"]),
    "a data set that raises": (data("load_broken"), ["LookupError: no such sample", "own.py:"]),
    "a callback that raises": (
        ("+callbacks.mine._target_=own.Raises",),
        ["callbacks.mine: KeyError: 'wrong'", "at BATCH_START", "own.py:"],
    ),
    "an algorithm that cuts the outputs": (
        ("+algorithms.mine._target_=own.CutsOutputs",),
        ["does not fit data=digits. In its loss", "outputs of float32 (3, 10)"],
    ),
}


@pytest.mark.parametrize(
    "fault",
    fast(WRONG, "a loss that is a vector", "outputs that are None", "data of another shape", "a callback that raises"),
)
def test_an_error_in_the_first_batch_is_one_message_and_leaves_nothing(folder: Path, run_here: Any, fault: str):
    arguments, expected = WRONG[fault]
    ended = run_here(*SHORT, *arguments, code=2)
    assert ended.err.count("error: ") == 1 and "Traceback" not in ended.err, ended.err
    for text in expected:
        assert text in ended.err, ended.err
    assert not (folder / "outputs").exists()


def test_an_error_of_one_rank_in_the_first_batch_is_one_message(folder: Path, run_app: Any):
    # A model with batch norm would add a line about its statistics on each rank.
    arguments = "model=mlp", "+callbacks.mine._target_=own.RaisesOnRank1", "launch.nproc_per_node=2"
    done = run_app(*SHORT, *arguments, exit_code=2)
    assert done.stderr.count("error:") == 1, done.stderr
    assert done.stderr.startswith("error: callbacks.mine: only on rank 1")
    assert "with model=mlp and data=digits" in done.stderr
    assert run_folders(folder) == []


def test_the_summary_of_a_refused_run_suggests_no_resume(folder: Path, run_here: Any):
    ended = run_here(*SHORT, "+callbacks=console_summary", "+callbacks.mine._target_=own.Raises", code=2)
    assert "resume" not in ended.out and "failed" not in ended.out
    assert ended.out.splitlines()[0].startswith("resnet8-digits  ")


def test_a_refused_run_leaves_nothing_in_mlflow_even_if_it_logged(folder: Path, run_here: Any):
    run_here(*SHORT, code=0)
    before = [path.name for path in run_folders(folder)]
    run_here(*SHORT, "+callbacks.logs._target_=own.Logs", "+callbacks.mine._target_=own.Raises", code=2)
    assert [path.name for path in run_folders(folder)] == before
    assert stores.query(folder / "outputs" / "mlflow.db", "select count(*) from runs") == [(1,)]
    assert not any((folder / "outputs" / ".mlflow_unsent").iterdir())


@pytest.mark.parametrize("verb", ["eval", "predict"])
def test_data_that_does_not_fit_the_weights_is_one_message_and_leaves_nothing(folder: Path, run_here: Any, verb: str):
    run_here(*SHORT, "model=mlp", "hydra.run.dir=run", code=0)
    ended = run_here(verb, "run", *data("load_wide"), code=2)
    expected = "In its forward pass in evaluation, with a batch of float32 (8, 3, 8, 8), int64 (8,) from 0 to 0:"
    assert ended.err.startswith(f"error: model=mlp does not fit data._target_=own.load_wide. {expected}\n")
    assert "an input has 192 numbers, not 64\n" in ended.err  # no key changes the weights
    assert "Traceback" not in ended.err and run_folders(folder) == []
    assert stores.query(folder / "outputs" / "mlflow.db", "select count(*) from runs") == [(1,)]


def test_values_logged_before_the_first_batch_are_recorded(folder: Path, run_here: Any):
    run_here(*SHORT, "+callbacks.logs._target_=own.Logs", code=0)
    store = folder / "outputs" / "mlflow.db"
    assert stores.query(store, "select value from metrics where key = 'early'") == [(1.0,)]
    assert [*folder.glob("outputs/mlartifacts/*/artifacts/images/early_image*.png")]


def test_a_later_error_fails_the_run_and_shows_only_lines_of_the_user(folder: Path, run_here: Any):
    ended = run_here(*SHORT, "+callbacks.mine._target_=own.Raises", "+callbacks.mine.batch=1", code=1)
    assert "calls in runner; HYDRA_FULL_ERROR=1 shows them]" in ended.err
    assert "in fail" in ended.err and "loop.py" not in ended.err
    (run,) = run_folders(folder)
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "FAILED" and "loop.py" in result["trace"]
    assert stores.query(folder / "outputs" / "mlflow.db", "select status from runs") == [("FAILED",)]


def test_a_sweep_continues_after_a_job_refused_by_its_first_batch(folder: Path, run_here: Any):
    sweep = ("-m", "+callbacks.mine._target_=own.Raises", "+callbacks.mine.batch=0,100")
    ended = run_here(*SHORT, *sweep, code=2)
    assert "1 finished, 1 refused" in ended.out
    assert ended.err.count("callbacks.mine: KeyError: 'wrong'") == 1, ended.err


def test_a_full_disk_in_the_first_batch_is_a_failure_not_a_wrong_config(folder: Path, run_here: Any):
    with (folder / "own.py").open("a") as own:
        own.write("""
import errno

class Full(Callback):
    def batch_start(self, state, logger):
        raise OSError(errno.ENOSPC, "No space left on device")
""")
    run_here(*SHORT, "+callbacks.mine._target_=own.Full", code=75)
    (run,) = run_folders(folder)
    assert json.loads((run / "result.json").read_text())["status"] == "FAILED"
