from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from screen import on_terminal, screen
from tiny_runs import tiny_trainer
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, ProgressBar
from runner.data import TensorLoader


class Save(Callback):
    """Waits after a batch, and saves a checkpoint."""

    def __init__(self, stop: str, path: Path):
        self.stop, self.path = int(stop.removesuffix("ba")), path

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.stop:
            time.sleep(0.2)
            save_checkpoint(state, self.path)


def make_trainer(**arguments: Any) -> Trainer:
    inputs, targets = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(inputs, targets, batch_size=12, shuffle=False),
        "max_duration": "11ep",
        "callbacks": [ProgressBar()],
    }
    return tiny_trainer(**(defaults | arguments))


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of a table as cells by title; each cell is aligned to the right edge of its title."""
    title, *lines = text.splitlines()
    assert title.split()[:2] == ["epoch", "batch"], text
    ends = [(match[0].strip(), match.end()) for match in re.finditer(r"  +\S+(?: \S+)*|^ *\S+", title)]
    starts = [0, *(end for _, end in ends)]
    return [{name: line[start:end].strip() for (name, end), start in zip(ends, starts, strict=False)} for line in lines]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal wide enough for all columns."""
    monkeypatch.setenv("COLUMNS", "200")


def test_each_epoch_has_a_line_with_its_metrics(capsys):
    memory = InMemoryLogger()
    with make_trainer(loggers=[memory]) as trainer:
        trainer.fit()
    rows = table(capsys.readouterr().out)
    losses = [value for _, value in memory.data["loss/train/total"]]
    assert [row["epoch"] for row in rows] == [f"{number}/11" for number in range(1, 12)]
    assert [row["batch"] for row in rows] == [f"{3 * number}/33" for number in range(1, 12)]
    for epoch, row in enumerate(rows):
        assert row["epoch loss"] == f"{sum(losses[3 * epoch : 3 * epoch + 3]) / 3:.4f}"
        assert row["eval loss"] == f"{memory.data['loss/eval/total'][epoch][1]:.4f}"
        for label in ("train", "eval"):
            accuracy = memory.data[f"metrics/{label}/MulticlassAccuracy"][epoch][1]
            assert row[f"{label} Accuracy"] == f"{accuracy:.4f}"
        assert re.fullmatch(r"\d+\.\d+", row["batch/s"]) and row["elapsed"].endswith(" s")
    assert rows[-1]["left"] == "0.0 s"


def test_each_evaluation_inside_an_epoch_has_a_line(capsys):
    with make_trainer(max_duration="2ep", eval_interval="2ba") as trainer:
        trainer.fit()
    rows = table(capsys.readouterr().out)
    shown = [(row["batch"], bool(row["eval loss"]), bool(row["train Accuracy"])) for row in rows]
    # An epoch has three batches, so batch 6 is also the end of the second.
    assert shown == [("2/6", True, False), ("3/6", False, True), ("4/6", True, False), ("6/6", True, True)]
    assert [row["epoch"] for row in rows] == ["1/2", "1/2", "2/2", "2/2"]


def test_a_run_that_ends_inside_an_epoch_has_a_line_for_it(capsys):
    with make_trainer(max_duration="4ba", eval_interval=0) as trainer:
        trainer.fit()
        rows = table(capsys.readouterr().out)
        assert [(row["epoch"], row["batch"]) for row in rows] == [("1", "3/4"), ("2", "4/4")]
        trainer.fit("2ba")
    rows = table(capsys.readouterr().out)
    assert [(row["epoch"], row["batch"]) for row in rows] == [("2", "6/6")]


@pytest.mark.parametrize(
    ("duration", "is_sized", "batches"),
    [
        ("2ep", True, ["3/6", "6/6"]),
        ("17sp", True, ["3/5", "5/5"]),
        ("2ep", False, ["3/6", "6/6"]),
        ("3600sec", True, ["3", "6"]),
    ],
)
def test_the_total_of_batches_follows_from_the_duration(capsys, duration: str, is_sized: bool, batches: list[str]):
    sized = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))] * 3

    class Unsized:
        def __iter__(self):
            return iter(sized)

    class Stop(Callback):
        def epoch_end(self, state, logger):
            if state.timestamp.epoch == 2:
                state.stop_training()

    loader = sized if is_sized else Unsized()
    arguments = {"train_dataloader": loader, "eval_dataloader": None, "max_duration": duration}
    with make_trainer(callbacks=[ProgressBar(), Stop()], **arguments) as trainer:
        trainer.fit()
    assert [row["batch"] for row in table(capsys.readouterr().out)] == batches


def test_the_time_left_includes_evaluations(capsys, steady):
    class Slow(Callback):
        def batch_start(self, state, logger):
            time.sleep(2.0)

        def eval_start(self, state, logger):
            time.sleep(3.0)

    with make_trainer(callbacks=[ProgressBar(), Slow()], max_duration="3ep") as trainer:
        trainer.fit()
    rows = table(capsys.readouterr().out)
    assert [row["left"] for row in rows] == ["18.0 s", "9.0 s", "0.0 s"]
    assert [row["elapsed"] for row in rows] == ["9.0 s", "18.0 s", "27.0 s"]
    assert [row["batch/s"] for row in rows] == ["0.50"] * 3  # without the evaluations


def test_a_slow_first_epoch_is_soon_left_out_of_the_time_left(capsys, steady):
    class Slow(Callback):
        def batch_start(self, state, logger):
            time.sleep(100.0 if state.timestamp.epoch == 0 else 1.0)

    with make_trainer(callbacks=[ProgressBar(), Slow()], max_duration="5ep") as trainer:
        trainer.fit()
    rows = table(capsys.readouterr().out)
    assert [row["left"] for row in rows] == ["20:00", "7:34", "6.0 s", "3.0 s", "0.0 s"]


@pytest.mark.parametrize("stop", ["4ba", "5ba", "6ba"])
def test_a_resumed_run_shows_the_loss_of_the_whole_epoch(capsys, tmp_path: Path, stop: str):
    def fit(**arguments: Any) -> list[dict[str, str]]:
        torch.manual_seed(0)
        with make_trainer(max_duration="3ep", **arguments) as trainer:
            trainer.fit()
        times = ("batch/s", "elapsed", "left")
        rows = table(capsys.readouterr().out)
        return [{key: cell for key, cell in row.items() if key not in times} for row in rows]

    whole = fit(callbacks=[ProgressBar(), Save(stop, tmp_path / "checkpoint")])
    resumed = fit(resume_path=tmp_path / "checkpoint")
    assert len(resumed) == 2 and resumed == whole[1:]


def test_a_failed_run_shows_its_finished_epochs(capsys):
    class Broken(ClassificationModel):
        def loss(self, outputs, batch):
            if self.training and state.timestamp.epoch == 2:
                raise RuntimeError("broken")
            return super().loss(outputs, batch)

    trainer = make_trainer(model=Broken(nn.Linear(3, 2), 2))
    state = trainer.state
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert [row["epoch"] for row in table(capsys.readouterr().out)] == ["1/11", "2/11"]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (20, ["epoch", "epoch loss"]),
        (60, ["epoch", "batch", "epoch loss", "eval loss", "eval Accuracy", "left"]),
        (80, ["epoch", "batch", "epoch loss", "train Accuracy", "eval loss", "eval Accuracy", "left"]),
    ],
)
def test_a_narrow_terminal_drops_the_least_important_columns(capsys, monkeypatch, width: int, titles: list[str]):
    monkeypatch.setenv("COLUMNS", str(width))
    with make_trainer(max_duration="1ep") as trainer:
        trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[0].strip()) == titles
    assert max(map(len, lines)) <= width and lines == [line.rstrip() for line in lines]


def test_a_metric_with_several_elements_is_left_out_of_the_table(capsys):
    class PerClass(ClassificationModel):
        def metrics(self, train):
            return {} if train else {"PerClass": MulticlassAccuracy(2, average=None), "Accuracy": MulticlassAccuracy(2)}

    with make_trainer(model=PerClass(nn.Linear(3, 2), 2), max_duration="2ep") as trainer:
        trainer.fit()
    title, *rows = capsys.readouterr().out.splitlines()
    assert "PerClass" not in title and "eval Accuracy" in title and len(rows) == 2


def test_without_a_terminal_a_long_epoch_prints_lines_at_an_interval(capsys):
    printed = threading.Event()

    class Wait(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 2:
                while "2/33" not in (shown := capsys.readouterr().out):
                    time.sleep(0.01)
                line = next(line for line in shown.splitlines() if "2/33" in line)
                assert line.split()[:2] == ["1/11", "2/33"]
                printed.set()
                state.stop_training()

    with make_trainer(callbacks=[ProgressBar(line_interval=0.03), Wait()]) as trainer:
        trainer.fit()
    assert printed.is_set()


PROGRAM = """
import sys, time, torch
from torch import nn
from runner.callbacks import ProgressBar
from runner import Callback, ClassificationModel, Trainer, save_checkpoint

now = [0.0]  # seconds; each batch advances the clock by 0.02
time.perf_counter = lambda: now[0]

class OnRequest:
    def __len__(self):
        return 10

    def __iter__(self):
        for _ in range(10):
            assert sys.stdin.readline()
            now[0] += 0.02
            yield torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)

with Trainer(
    model=ClassificationModel(nn.Linear(3, 2), 2),
    train_dataloader=OnRequest(),
    optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
    max_duration="3ep",
    callbacks=[ProgressBar(refresh_interval=0.02)],
    device="cpu",
) as trainer:
    trainer.fit()
print("done")
"""


def plain(output: str) -> str:
    """Return the text sent to a terminal, without cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n")


def test_on_a_terminal_a_bar_grows_and_finished_epochs_stay(tmp_path: Path):
    drawn: set[str] = set()

    def request_batches(written: str, process: Any) -> None:
        # Each batch waits until the number of batches before it is drawn, so that no number is skipped.
        numbers = {*re.findall(r" [123]/3 +(\d+)/30 ", plain(written))}
        process.stdin.write(b"\n" * len(numbers - drawn - {"30"}))  # after the last batch, the process may have ended
        process.stdin.flush()
        drawn.update(numbers)

    code, output = on_terminal(["-c", PROGRAM], 100, tmp_path, react=request_batches)
    assert code == 0
    text = plain(output)
    numbers = {int(number) for number in re.findall(r" [123]/3 +(\d+)/30 ", text)}
    assert numbers == set(range(31))
    rows = table(screen(output).removesuffix("\ndone\n"))
    assert [(row["epoch"], row["batch"]) for row in rows] == [("1/3", "10/30"), ("2/3", "20/30"), ("3/3", "30/30")]
    assert [row["batch/s"] for row in rows] == ["50.0"] * 3
    assert "\u2501" in text and "\u2501" not in screen(output)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is hidden"


@pytest.mark.parametrize("name", ["refresh_interval", "line_interval"])
def test_wrong_arguments_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}=0: must be a number of seconds above 0"):
        ProgressBar(**{name: 0})
