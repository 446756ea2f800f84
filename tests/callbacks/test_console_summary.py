from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner import Callback, ClassificationModel, Evaluator, LoggerDestination, Trainer
from runner.algorithms import EMA, LabelSmoothing, MixUp
from runner.callbacks import CheckpointSaver, ConsoleSummary, InMemoryLogger, LRMonitor
from runner.callbacks._run_description import describe_run
from runner.data import TensorLoader


def make_trainer(tmp_path, *callbacks: Callback, **arguments: Any) -> Trainer:
    inputs, targets = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(inputs, targets, batch_size=12, shuffle=False),
        "optimizers": lambda params: torch.optim.AdamW(params, lr=0.1),
        "max_duration": "3ep",
        "callbacks": [*callbacks, ConsoleSummary()],
        "run_dir": tmp_path / "run",
        "run_name": "tiny-run",
    }
    return tiny_trainer(**(defaults | arguments))


def test_the_first_lines_describe_the_run(tmp_path, capsys):
    model = ClassificationModel(nn.Linear(1000, 2), 2)
    model.module.bias.requires_grad_(False)
    inputs = torch.randn(1200, 1000)
    loader = TensorLoader(inputs, torch.zeros(1200, dtype=torch.int64), batch_size=400, shuffle=True)
    with make_trainer(
        tmp_path,
        CheckpointSaver(),
        LRMonitor(),
        model=model,
        train_dataloader=loader,
        seed=7,
        eval_dataloader=None,
        algorithms=[LabelSmoothing(), MixUp(), EMA()],
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
        lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"tiny-run  {tmp_path / 'run'}",
        "Linear, 2 k parameters (2 k trainable), fp32 on cpu (1 thread), AdamW, seed 7",
        "1ba; train 1,200 samples in 3 batches of 400",
    ]


def test_events_are_shown_on_request(tmp_path, capsys):
    algorithms = [LabelSmoothing(), MixUp(), EMA()]
    arguments = {"callbacks": [LRMonitor(), ConsoleSummary(events=True)], "algorithms": algorithms}
    with make_trainer(tmp_path, **arguments, max_duration="1ba") as trainer:
        trainer.fit()
        text = capsys.readouterr().out
    assert text.splitlines()[3].startswith("events  init")
    assert "before_loss: mixup, label_smoothing" in text
    assert "after_loss: label_smoothing, mixup" in text
    assert "console_summary" not in text


@pytest.mark.parametrize(("samples", "as_list", "text"), [(1, False, "eval 1 sample"), (5, True, "eval 2 batches")])
def test_the_header_has_the_size_of_the_evaluation(tmp_path, capsys, samples: int, as_list: bool, text: str):
    loader = TensorLoader(torch.zeros(samples, 3), torch.zeros(samples).long(), batch_size=3, shuffle=False)
    with make_trainer(tmp_path, eval_dataloader=[*loader] if as_list else loader, max_duration="1ba") as trainer:
        trainer.fit()
        assert capsys.readouterr().out.splitlines()[2] == f"1ba; train 12 samples in 3 batches of 4; {text}"


def test_the_header_says_how_many_of_the_samples_are_used(tmp_path):
    data = torch.utils.data.TensorDataset(torch.zeros(11, 3), torch.zeros(11, dtype=torch.int64))
    evaluators = [
        Evaluator("dropped", TensorLoader(*data.tensors, batch_size=4, shuffle=False, drop_last=True)),
        Evaluator("torch", torch.utils.data.DataLoader(data, batch_size=4, drop_last=True)),
        Evaluator("few", TensorLoader(*data.tensors, batch_size=4, shuffle=False), subset_num_batches=1),
        Evaluator("all", TensorLoader(*data.tensors, batch_size=4, shuffle=False), subset_num_batches=3),
    ]
    arguments = {"eval_dataloader": evaluators, "train_subset_num_batches": 2, "max_duration": "1ba"}
    with make_trainer(tmp_path, **arguments) as trainer:
        trainer.fit()
        (line,) = describe_run(trainer.state, 400)[1:]
    assert line == (
        "1ba; train 8 of 12 samples in 2 batches of 4; dropped 8 of 11 samples; torch 8 of 11 samples; "
        "few 4 of 11 samples; all 11 samples"
    )


def test_the_header_is_shortened_in_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "48")
    with make_trainer(tmp_path, max_duration="1ba") as trainer:
        trainer.fit()
        lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["Linear, 8 parameters, fp32 on cpu (1 thread)", "1ba; train 12 samples in 3 batches of 4"]


def test_the_last_lines_have_the_results(tmp_path, capsys):
    class Compare(LoggerDestination):
        ui_command = "compare --all"

        def fit_end(self, state, logger): ...

    memory = InMemoryLogger()
    arguments = {"loggers": [Compare(), memory], "config": {"seed": 0}}
    with make_trainer(tmp_path, CheckpointSaver(), **arguments) as trainer:
        trainer.fit()
        capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    rows = {name: cells for name, *cells in (re.split(" {2,}", line) for line in lines)}
    for name, key in (("loss", "loss/eval/total"), ("MulticlassAccuracy", "metrics/eval/MulticlassAccuracy")):
        series = memory.data[key]
        best = (min if name == "loss" else max)(value for _, value in series)
        epoch = next(timestamp.epoch for timestamp, value in series if value == best)
        assert rows[f"eval/{name}"] == [f"{series[-1][1]:.4f}", f"{best:.4f}", f"epoch {epoch}"]
    losses = [value for _, value in memory.data["loss/train/total"]]
    assert rows["epoch loss"] == [f"{sum(losses[-3:]) / 3:.4f}", "epoch mean"]
    accuracy = memory.data["metrics/train/MulticlassAccuracy"][-1][1]
    assert rows["train/MulticlassAccuracy"] == [f"{accuracy:.4f}"]
    text = "\n".join(lines)
    assert re.search(r"^trained  3 epochs, 9 batches in [\d.]+ s$", text, re.MULTILINE)
    assert re.search(r"^speed    [\d,]+ samples/s in the [\d.]+ s without evaluations$", text, re.MULTILINE)
    assert lines[-5:] == [
        f"run      {tmp_path / 'run'}",
        "to evaluate it, train it for longer, compare it:",
        f"python -m runner eval {tmp_path / 'run'}",
        f"python -m runner resume {tmp_path / 'run'} trainer.max_duration=6ep",
        "compare --all",
    ]


def test_a_run_that_was_stopped_does_not_suggest_more_epochs(tmp_path, capsys):
    class Stop(Callback):
        def epoch_end(self, state, logger):
            state.stop_training()

    with make_trainer(tmp_path, Stop(), CheckpointSaver(), config={"seed": 0}) as trainer:
        trainer.fit()
        capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["to evaluate it:", f"python -m runner eval {tmp_path / 'run'}"]


def test_the_last_lines_show_metrics_of_single_classes_after_other_metrics(tmp_path, capsys):
    class PerClass(Callback):
        def eval_end(self, state, logger):
            logger.log_metrics({f"metrics/eval/PerClass/{number}": 0.0 for number in range(10)})

    with make_trainer(tmp_path, PerClass()) as trainer:
        trainer.fit()
        capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    keys = [line.partition("  ")[0] for line in lines[1:6]]
    others = ["eval/MulticlassAccuracy", "eval/loss", "train/MulticlassAccuracy", "epoch loss"]
    assert keys == [*others, "eval/PerClass/0"]
    assert "and 6 more, in the log of the run" in lines


class Fail(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 5:
            raise RuntimeError("broken")


class Interrupt(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 5:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("ending", "error", "outcome"),
    [
        (Fail, RuntimeError, "failed in epoch 2, after 5 batches"),
        (Interrupt, KeyboardInterrupt, "killed in epoch 2, after 6 batches"),
    ],
)
def test_a_run_that_ended_early_says_how_to_resume_it(tmp_path, capsys, monkeypatch, ending, error, outcome: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        make_trainer(tmp_path, CheckpointSaver(), ending(), config={"seed": 0}).fit()
    text = " ".join(capsys.readouterr().out.split())
    assert outcome in text
    assert "to resume it: python -m runner resume run" in text
    with pytest.raises(error):
        make_trainer(tmp_path, CheckpointSaver(), ending(), run_dir=tmp_path / "two").fit()
    assert "to resume it: Trainer(..., resume_path='two')" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(error):
        make_trainer(tmp_path, ending()).fit()
    assert "to resume" not in capsys.readouterr().out
    with pytest.raises(error):
        make_trainer(tmp_path, ending(), config={"seed": 0}).fit()
    text = " ".join(capsys.readouterr().out.split())
    assert "to start it again (no checkpoint was written): python -m runner resume run" in text


class Sleep(Callback):
    """Sleeps for 2 seconds in each batch, 3 in each evaluation, and 50 at FIT_END and CLOSE."""

    def batch_start(self, state, logger):
        time.sleep(2)

    def eval_start(self, state, logger):
        time.sleep(3)

    def fit_end(self, state, logger):
        time.sleep(50)  # as if it drew pictures

    close = fit_end  # as if it uploaded the last values


@pytest.mark.usefixtures("steady")
def test_the_speed_excludes_evaluations_and_the_end_of_the_run(tmp_path, capsys):
    with make_trainer(tmp_path, Sleep()) as trainer:
        trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert "trained  3 epochs, 9 batches in 27.0 s" in lines
    assert "speed    2 samples/s in the 18.0 s without evaluations" in lines


@pytest.mark.usefixtures("steady")
def test_the_time_of_a_failed_run_excludes_the_end_of_the_run(tmp_path, capsys):
    with pytest.raises(RuntimeError):
        make_trainer(tmp_path, Sleep(), Fail()).fit()
    assert "failed   in epoch 2, after 5 batches, 13.0 s" in capsys.readouterr().out.splitlines()


def test_a_resumed_run_remembers_the_best_value(tmp_path, capsys):
    class FixedLosses(ClassificationModel):
        def loss(self, outputs, batch):
            losses = [1.0, 3.0, 2.0]
            return super().loss(outputs, batch) * 0 + losses[trainer.state.timestamp.epoch - 1]

    model = FixedLosses(nn.Linear(3, 2), 2)
    with make_trainer(tmp_path, CheckpointSaver(), model=model) as trainer:
        trainer.fit("2ep")
    with make_trainer(tmp_path, CheckpointSaver(), model=model, resume_path=tmp_path / "run") as trainer:
        trainer.fit()
    (row,) = (line for line in capsys.readouterr().out.splitlines()[-8:] if line.startswith("eval/loss"))
    assert row.split() == ["eval/loss", "2.0000", "1.0000", "epoch", "1"]


@pytest.mark.parametrize(("diverged", "warned"), [(range(4, 13), False), (range(4, 14), True), (range(2, 21), True)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_ten_batches_without_a_finite_loss_give_one_warning(
    tmp_path, caplog, diverged: range, warned: bool, value: float
):
    class Diverges(ClassificationModel):
        batches = 0

        def loss(self, outputs, batch):
            self.batches += self.training
            return super().loss(outputs, batch) * (value if self.batches in diverged else 1.0)

    class FrozenSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Keeps the weights, which therefore stay finite."""

    arguments = {"model": Diverges(nn.Linear(3, 2), 2), "optimizers": FrozenSGD, "max_duration": "7ep"}
    with make_trainer(tmp_path, **arguments) as trainer:
        trainer.fit()
    warnings = [message for message in caplog.messages if "training loss" in message]
    assert len(warnings) == warned
    if warned:
        first = diverged[0]
        assert f"training loss has been {value} since epoch {(first - 1) // 3 + 1}, batch {first}: lower" in warnings[0]


def test_an_evaluation_alone_prints_no_summary(tmp_path, capsys):
    with make_trainer(tmp_path) as trainer:
        trainer.eval()
    assert capsys.readouterr().out == ""
