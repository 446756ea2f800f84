from __future__ import annotations

import math
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from limited_files import limited_files
from tiny_runs import tiny_trainer

from runner import Callback, Logger, MetricRecord, State, Timestamp, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, LearningCurves, LRMonitor
from runner.callbacks._curves_picture import draw, smooth
from runner.callbacks.learning_curves import next_point
from runner.data import TensorLoader
from runner.optim.schedulers import constant
from runner.pictures.curves import MAX_POINTS, read_curve, write_curves
from runner.pictures.figure import render


def make_trainer(tmp_path, *callbacks, **arguments: Any) -> Trainer:
    """Return a Trainer for nine batches in three epochs, too few for a picture."""
    inputs, targets = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(inputs, targets, batch_size=12, shuffle=False),
        "max_duration": "3ep",
        "run_dir": tmp_path / "run",
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def lines(curves: LearningCurves) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return the drawn points by panel and label in the legend."""
    drawn = {}
    for axes in draw(curves.curves, "run", 3).axes:
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        handles = axes.get_legend().legend_handles
        newest_first = [*axes.get_lines()][::-1]
        legend_lines = [next(line for line in newest_first if line.get_color() == item.get_color()) for item in handles]
        drawn[axes.get_ylabel()] = {
            text: (list(line.get_xdata()), list(line.get_ydata()))
            for text, line in zip(texts, legend_lines, strict=True)
        }
    return drawn


def test_the_picture_is_in_the_runs_folder_and_logged(tmp_path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, LearningCurves(), memory, max_duration="4ep") as trainer:
        trainer.fit()
    path = tmp_path / "run" / "learning_curves.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[:2] == (680, 2520)  # two pixels for each pixel of a plain screen
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    assert [(str(file), folder) for file, folder in memory.artifacts] == [(str(path), "plots")]
    for key in ("loss/train/total", "metrics/eval/MulticlassAccuracy"):
        curve = read_curve(tmp_path / "run", key)
        steps, values = memory.get_timeseries(key)
        assert (list(curve.steps), list(curve.values)) == (steps, pytest.approx(values, rel=1e-5))


def test_a_run_of_fewer_than_ten_batches_has_points_but_no_picture(tmp_path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, LearningCurves(), memory) as trainer:
        trainer.fit()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["learning_curves.csv"]
        assert list(read_curve(tmp_path / "run", "loss/train/total").steps) == [*range(1, 10)]
        trainer.fit("1ba")
    assert (tmp_path / "run" / "learning_curves.png").exists() and len(memory.artifacts) == 1


def test_a_full_disk_gives_one_warning_and_leaves_no_files(tmp_path, caplog):
    class FullDisk(Callback):
        def epoch_end(self, state, logger):
            if state.timestamp.epoch == 4:
                stack.enter_context(limited_files(1000))

    with ExitStack() as stack, make_trainer(tmp_path, FullDisk(), LearningCurves(), max_duration="4ep") as trainer:
        trainer.fit()
    (record,) = caplog.records
    assert record.getMessage().startswith("learning_curves cannot write ([Errno 27] ")
    assert list((tmp_path / "run").iterdir()) == []


def test_curves_equal_the_logged_values(tmp_path):
    memory, curves = InMemoryLogger(), LearningCurves()
    with make_trainer(tmp_path, LRMonitor(), curves, memory) as trainer:
        trainer.fit()
    drawn = lines(curves)
    assert list(drawn) == ["loss", "MulticlassAccuracy", "learning rate, per batch"]
    for panel, label, key in (
        ("loss", "train", "loss/train/total"),
        ("loss", "eval", "loss/eval/total"),
        ("MulticlassAccuracy", "train", "metrics/train/MulticlassAccuracy"),
        ("MulticlassAccuracy", "eval", "metrics/eval/MulticlassAccuracy"),
        ("learning rate, per batch", "SGD", "lr-SGD/group0"),
    ):
        steps, values = memory.get_timeseries(key)
        assert drawn[panel][label] == (steps, values)


def test_learning_rates_of_all_groups_are_drawn_without_lr_monitor(tmp_path):
    def two_groups(params: Any) -> torch.optim.Optimizer:
        weight, bias = params
        groups: Any = [{"params": [weight], "lr": 0.5}, {"params": [bias], "lr": torch.tensor(0.25)}]
        return torch.optim.SGD(groups)

    curves = LearningCurves()
    with make_trainer(tmp_path, curves, optimizers=two_groups, schedulers=[constant()], max_duration="1ep") as trainer:
        trainer.fit()
    drawn = lines(curves)["learning rate, per batch"]
    assert drawn == {"SGD": ([1, 2, 3], [0.5] * 3), "SGD/group1": ([1, 2, 3], [0.25] * 3)}


def test_a_learning_rate_in_a_tensor_is_drawn_as_it_was_at_each_batch(tmp_path):
    class Halve(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            state.optimizers[0].param_groups[0]["lr"].mul_(0.5)  # in place, as schedulers do on a GPU

    curves = LearningCurves()

    def one_rate(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=torch.tensor(0.5), foreach=False)

    with make_trainer(tmp_path, curves, Halve(), optimizers=one_rate, schedulers=None, max_duration="1ep") as trainer:
        trainer.fit()
    assert lines(curves)["learning rate, per batch"] == {"SGD": ([1, 2, 3], [0.5, 0.25, 0.125])}


def test_axes_count_batches_and_epochs_and_evaluations_have_markers(tmp_path):
    curves = LearningCurves()
    with make_trainer(tmp_path, curves, run_name="mine") as trainer:
        trainer.fit()
    figure = draw(curves.curves, "mine", 3)
    figure.draw_without_rendering()
    assert figure.get_suptitle() == "mine"
    for axes in figure.axes:
        (above,) = axes.child_axes
        assert (axes.get_xlabel(), above.get_xlabel()) == ("batch", "epoch")
        assert above.get_xlim() == pytest.approx([end / 3 for end in axes.get_xlim()])
    train, evaluated = figure.axes[0].get_lines()
    assert (train.get_marker(), evaluated.get_marker()) == ("", "o")
    assert not draw(curves.curves, "mine", None).axes[0].child_axes  # data without a length


def test_a_smoothed_curve_does_not_lag_and_reaches_both_ends():
    falling = [100.0 - step for step in range(100)]
    assert smooth(falling, 31) == pytest.approx(falling)
    noisy = [value + (-1) ** step for step, value in enumerate(falling)]
    assert np.abs(np.subtract(smooth(noisy, 31), falling)).max() < 0.3
    gaps = [math.nan if step in (0, 40, 41, 99) else value for step, value in enumerate(falling)]
    assert smooth(gaps, 31) == pytest.approx(gaps, nan_ok=True)
    assert math.isnan(smooth([math.nan] * 3, 3)[1]) and smooth([1.0], 3) == [1.0]


def test_the_loss_of_many_batches_is_smoothed_and_the_legend_says_so():
    curves = LearningCurves()
    for step in range(1, 201):
        loss = math.nan if step >= 180 else 3.0 - 0.01 * step + 0.1 * (-1) ** step
        curves.log_records([MetricRecord({"loss/train/total": loss}, step, Timestamp(), 0.0)])
    (axes,) = draw(curves.curves, "run", None).axes
    faint, smoothed = axes.get_lines()
    assert np.array_equal(faint.get_ydata(), curves._curves["loss/train/total"].values, equal_nan=True)
    assert smoothed.get_ydata()[:179] == pytest.approx(3.0 - 0.01 * np.arange(1, 180), abs=0.08)
    (text,) = axes.get_legend().get_texts()
    assert text.get_text() == "train,\nsmoothed over 7 batches,\nnot finite at batch 180 and later"


def test_a_loss_over_many_powers_of_ten_has_a_logarithmic_axis():
    curves = LearningCurves()
    for step in range(1, 5):
        losses: dict[str, Any] = {"loss/train/total": 10.0**step, "loss/eval/total": 0.1}
        curves.log_records([MetricRecord(losses, step, Timestamp(), 0.0)])
    assert draw(curves.curves, "run", None).axes[0].get_yscale() == "log"


@pytest.mark.parametrize("values", [[1.0], [math.nan, math.nan], [math.inf, 1e300, -1e300], [0.0, 0.0]])
def test_any_values_can_be_drawn(values: list[float]):
    curves = LearningCurves()
    for step, value in enumerate(values, start=1):
        metrics: dict[str, Any] = {"loss/train/total": value, "loss/eval/total": value, "metrics/eval/$\\frac{": value}
        curves.log_records([MetricRecord(metrics, step, Timestamp(), 0.0)])
    assert render(draw(curves.curves, "_$a", 1), "png").startswith(b"\x89PNG")


def test_many_points_are_averaged_into_few():
    curves = LearningCurves()
    steps = range(1, 40 * MAX_POINTS + 1)
    for step in steps:
        curves.log_records([MetricRecord({"loss/a/total": 2.0 * step, "time/batch": step}, step, Timestamp(), 0.0)])
    drawn_steps, drawn_values = lines(curves)["loss"]["a"]
    assert MAX_POINTS <= len(drawn_steps) < 2 * MAX_POINTS
    assert np.mean(drawn_steps) == np.mean(steps)  # every step is in exactly one mean
    assert drawn_values == [2 * step for step in drawn_steps]
    assert list(curves.state_dict()["curves"]) == ["loss/a/total"]


def test_only_curves_that_fit_in_the_picture_are_kept_and_drawn(tmp_path):
    curves, per_class = LearningCurves(), LearningCurves()
    classes = {f"metrics/train/PerClass/{number}": 0.1 for number in range(1000)}
    others = {"metrics/train/Accuracy": 0.5} | {f"metrics/eval/Metric{number}": 0.1 for number in range(9)}
    for step in range(1, 4):
        curves.log_records([MetricRecord(classes | others, step, Timestamp(), 0.0)])
        per_class.log_records([MetricRecord(classes, step, Timestamp(), 0.0)])
    drawn = lines(curves)
    assert len(drawn) == 6 and next(iter(drawn)) == "Accuracy"
    assert draw(curves.curves, "run", None, curves._left_out).get_suptitle() == "run  (1,004 curves are not drawn)"
    kept = [*per_class.state_dict()["curves"]]
    assert [*per_class.curves] == kept == [f"metrics/train/PerClass/{number}" for number in range(8)]
    write_curves(tmp_path, curves.curves)
    assert list(read_curve(tmp_path, "metrics/train/Accuracy").values) == [0.5] * 3


def test_a_checkpoint_of_a_thousand_keys_is_small():
    curves = LearningCurves()
    metrics = {f"loss/train/part{number}": 0.5 for number in range(1000)}
    curves.log_records([MetricRecord(metrics, step, Timestamp(), 0.0) for step in range(1, 2000)])
    kept = curves.state_dict()
    assert len(kept["curves"]) == 8 and kept["points"].shape == (8 * 1999, 2)
    loaded = LearningCurves()
    loaded.load_state_dict(kept)
    restored, original = ([list(curve.values) for curve in logger.curves.values()] for logger in (loaded, curves))
    assert restored == original


def test_a_resumed_run_draws_the_curves_from_the_start(tmp_path):
    whole, first, second = LearningCurves(), LearningCurves(), LearningCurves()
    torch.manual_seed(0)
    with make_trainer(tmp_path, whole) as trainer:
        trainer.fit()
    torch.manual_seed(0)
    with make_trainer(tmp_path, first) as trainer:
        trainer.fit("4ba")
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    with make_trainer(tmp_path, second, resume_path=tmp_path / "checkpoint") as trainer:
        trainer.fit()
    drawn, expected = lines(second), lines(whole)
    # The first session ended with an evaluation that the uninterrupted run lacks.
    steps, values = drawn["loss"]["eval"]
    extra = steps.index(4)
    assert (steps[:extra] + steps[extra + 1 :], values[:extra] + values[extra + 1 :]) == expected["loss"]["eval"]
    assert drawn["loss"]["train"] == expected["loss"]["train"]


@pytest.mark.parametrize("filename", ["curves", "a/curves.png", "curves.jpeg"])
def test_wrong_arguments_are_refused(filename: str):
    with pytest.raises(ValueError, match=f"filename='{filename}'"):
        LearningCurves(filename)


def test_learning_rates_are_drawn_at_each_batch_at_first_and_then_ever_more_rarely():
    points = [1]
    while points[-1] < 100_000:
        points.append(next_point(points[-1]))
    assert points[:256] == [*range(1, 257)]
    gaps = [after - before for before, after in pairwise(points)]
    assert gaps == sorted(gaps) and len(points) < 256 + 128 * 10
    assert next_point(points[-2] + 1) == points[-1]  # a resumed run has the same points
