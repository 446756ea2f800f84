from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import start_python
from torch import nn

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, ProgressBar
from runner.callbacks._run_description import describe_metrics
from runner.data import TensorLoader


class Save(Callback):
    """Saves a checkpoint after so many batches, which take a while."""

    def __init__(self, stop: str, path: Path):
        self.stop, self.path = int(stop.removesuffix("ba")), path

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.stop:
            time.sleep(0.2)
            save_checkpoint(state, self.path)


def make_trainer(**arguments: Any) -> Trainer:
    inputs, targets = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Linear(3, 2), 2),
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(inputs, targets, batch_size=12, shuffle=False),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "11ep",
        "callbacks": [ProgressBar()],
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def test_without_a_terminal_there_is_a_line_for_each_epoch_with_its_metrics(capsys):
    memory = InMemoryLogger()
    with make_trainer(loggers=[memory]) as trainer:
        trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    losses = [value for _, value in memory.data["loss/train/total"]]
    for epoch, line in enumerate(lines):
        expected = {
            "train loss": sum(losses[3 * epoch : 3 * epoch + 3]) / 3,
            "eval loss": memory.data["loss/eval/total"][epoch][1],
        }
        assert line.startswith(f"epoch {epoch + 1:2}/11  |  train loss ")
        for name, value in expected.items():
            assert f"{name} {value:.4g} Accuracy " in line
        for label in ("train", "eval"):
            accuracy = memory.data[f"metrics/{label}/MulticlassAccuracy"][epoch][1]
            assert re.search(rf"{label} loss \S+ Accuracy {accuracy:.4g} ", line)
        assert re.search(r"\|  [\d.e+]+ ba/s  \|  \S+ s$", line)


def test_an_epoch_that_is_not_finished_gets_a_line_at_the_end(capsys):
    with make_trainer(max_duration="4ba") as trainer:
        trainer.fit()
        assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["epoch 1", "epoch 2"]
        trainer.fit("2ba")
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["epoch 2"]


@pytest.mark.parametrize("stop", ["4ba", "5ba", "6ba"])
def test_a_resumed_run_shows_the_whole_epoch(capsys, tmp_path: Path, stop: str):
    def fit(**arguments: Any) -> list[list[str]]:
        torch.manual_seed(0)
        with make_trainer(max_duration="3ep", **arguments) as trainer:
            trainer.fit()
        return [line.split("  |  ") for line in capsys.readouterr().out.splitlines()]

    whole = fit(callbacks=[ProgressBar(), Save(stop, tmp_path / "checkpoint")])
    again = fit(resume_path=tmp_path / "checkpoint")
    assert len(again) == 2 and [line[:-2] for line in again] == [line[:-2] for line in whole[1:]]
    # Three batches, in the seconds before the checkpoint and since the resume.
    rate, seconds = (float(part.split()[0]) for part in again[0][-2:])
    assert rate * seconds == pytest.approx(3, rel=0.02) and seconds >= 0.2


def test_a_run_that_fails_still_shows_the_epochs_that_it_finished(capsys):
    class Broken(ClassificationModel):
        def loss(self, outputs, batch):
            if self.training and state.timestamp.epoch == 2:
                raise RuntimeError("broken")
            return super().loss(outputs, batch)

    trainer = make_trainer(model=Broken(nn.Linear(3, 2), 2))
    state = trainer.state
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_is_not_a_loss_or_metric_is_left_out():
    values = {
        "time/epoch": 1.0,
        "metrics/b/BinaryF1": 0.25,
        "loss/b/total": 2.0,
        "loss/train/total": 0.123456,
        "lr-SGD/group0": 1.0,
    }
    assert describe_metrics(values) == ["train loss 0.1235", "b loss 2 F1 0.25"]


def test_of_many_metrics_the_first_are_shown():
    values = {f"metrics/train/PerClass/{number}": 0.0 for number in range(1000)} | {"metrics/train/Accuracy": 0.5}
    (line,) = describe_metrics(values)
    assert line.startswith("train Accuracy 0.5 PerClass/0 0 ")
    assert line.endswith(" PerClass/6 0 and 993 more")


PROGRAM = """
import sys, time, torch
from torch import nn
from runner.callbacks import ProgressBar
from runner import Callback, ClassificationModel, Trainer, save_checkpoint

now = [0.0]  # seconds of a clock that goes on by 0.02 a batch
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


def plain(output: bytes) -> str:
    """What a terminal was sent, without what moves its cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="replace")).replace("\r", "\n")


def test_on_a_terminal_a_bar_grows_and_finished_epochs_stay():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    with start_python(["-c", PROGRAM], stdin=subprocess.PIPE, stdout=theirs, env=environment) as process:
        os.close(theirs)
        output, asked = b"", 0
        deadline = time.monotonic() + 120
        while (left := deadline - time.monotonic()) > 0 and select.select([ours], [], [], left)[0]:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not chunk:
                break
            output += chunk
            # A batch is trained when it is seen how many were before: each number is drawn, however slow that is.
            seen = {*re.findall(r"epoch (\d)/3  \S+  (\d)/10", plain(output))}
            assert process.stdin is not None
            process.stdin.write(b"\n" * (len(seen) - asked))
            process.stdin.flush()
            asked = len(seen)
        else:
            process.kill()  # a number is not drawn
    os.close(ours)
    assert process.returncode == 0
    text = plain(output)
    shown = {int(number) for number in re.findall(r"epoch 2/3  \S+  (\d+)/10", text)}
    assert set(range(10)) <= shown <= set(range(11))
    assert re.search(r"loss [\d.]+ +50 ba/s +0:00:00 left", text)
    finished = [line for line in text.splitlines() if "|" in line]
    assert [line.split("  ")[0] for line in finished] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all(line.rstrip().endswith("|  50 ba/s  |  0.2 s") for line in finished)
    assert text.rstrip().endswith("done")
    assert output.decode().rindex("\x1b[?25h") > output.decode().rindex("\x1b[?25l"), "the cursor is hidden"


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="refresh_interval=0"):
        ProgressBar(0)
