"""`runner explain`: which hooks run at each event, in which order and why, compared with the engine of a real run."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from composed_configs import composed
from python_process import run_python

from runner import Algorithm, Callback, ClassificationModel
from runner.config import build
from runner.config.experiment import Experiment
from runner.core.destination import LoggerDestination
from runner.timing.event import Event
from runner.verbs.explain import print_tables, timeline

OWN = "explained_here"
LOUD = """
from runner import Callback


class Loud(Callback):
    def __init__(self):
        print("loud")
"""


class Wrapper(Algorithm):
    """Wraps the loss.

    More than one line.
    """

    runs_before = ("LabelSmoothing",)
    conflicts_with = ("EMA", "MixUp")

    def before_loss(self, state: Any, logger: Any) -> None:
        """Encodes the targets."""

    def after_loss(self, state: Any, logger: Any) -> None: ...


class AllEvents(Callback):
    def __init__(self, **options: Any) -> None:
        print("a constructor that prints")

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        """Records the event."""
        raise AssertionError("called")

    def close(self, state: Any, logger: Any) -> None:
        raise AssertionError("called")


class OwnMatch(Algorithm):
    def match(self, event: Event, state: Any) -> bool:
        raise AssertionError("called")

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        """Changes the state."""

    def batch_start(self, state: Any, logger: Any) -> None:
        """Starts a batch."""


class Destination(LoggerDestination):
    def init(self, state: Any, logger: Any) -> None:
        raise AssertionError("called")


class First(Algorithm):
    runs_before = ("Second",)

    def batch_start(self, state: Any, logger: Any) -> None: ...


class Second(Algorithm):
    runs_before = ("First",)

    def batch_start(self, state: Any, logger: Any) -> None: ...


class Stepping(ClassificationModel):
    def training_step(self, state: Any) -> None: ...  # type: ignore[override]

    def metrics(self, train: bool) -> Any:
        return {}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the working directory and that of temporary files, and makes this module importable as `OWN`."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])


def explain(*overrides: str) -> dict[str, Any]:
    """Return what `runner explain` says about a config."""
    return timeline(Experiment(composed(*overrides)))


def reasons_by_name(explained: dict[str, Any], event: Event) -> dict[str, list[str]]:
    """Return the names of the hooks that run at an event, in order, with the reasons for their places."""
    (row,) = (row for row in explained["events"] if row["event"] == event)
    return {hook["name"]: hook["why"] for hook in row["runs"]}


def runs(explained: dict[str, Any], event: Event) -> list[str]:
    """Return the names of the hooks that run at an event, in order."""
    return [*reasons_by_name(explained, event)]


def why(explained: dict[str, Any], event: Event, name: str) -> list[str]:
    """Return the reasons for the place of a hook at an event."""
    return reasons_by_name(explained, event)[name]


@pytest.mark.parametrize(
    "overrides",
    [
        ("+callbacks=[speed_monitor,early_stopper,lr_monitor]", "~callbacks.mlflow_logger"),
        ("callbacks=none",),
        ("model=gpt", "data=synthetic_tokens", "algorithms=gradient_clipping", "callbacks=checkpoint_saver"),
    ],
    ids=str,
)
def test_hooks_are_listed_in_the_order_of_a_real_run(tmp_path: Path, overrides: tuple[str, ...]):
    overrides = (f"+algorithms.wrapper._target_={OWN}.Wrapper", *overrides)
    explained = explain(*overrides)
    assert [row["event"] for row in explained["events"]] == [*Event]
    with build.build(Experiment(composed(*overrides)), tmp_path / "run", "") as trainer:
        for event in Event:
            assert runs(explained, event) == [hook.config_key for hook in trainer.engine.listeners(event)], event
        hooks = [*trainer.state.algorithms, *trainer.state.callbacks, *trainer.state.loggers]
    assert [row["name"] for row in explained["hooks"]] == [hook.config_key for hook in hooks]
    assert explained["conflicts"] == explained["unchecked"] == []


def test_each_place_of_a_hook_has_a_reason():
    explained = explain("+algorithms=mixup", f"+callbacks.all._target_={OWN}.AllEvents")
    assert runs(explained, Event.BEFORE_LOSS) == ["mixup", "label_smoothing", "all"]
    place = "algorithms come first"
    assert why(explained, Event.BEFORE_LOSS, "mixup") == [place, "before label_smoothing, by LabelSmoothing.runs_after"]
    assert why(explained, Event.BEFORE_LOSS, "label_smoothing")[1] == "after mixup, by LabelSmoothing.runs_after"
    assert runs(explained, Event.AFTER_LOSS)[:2] == ["label_smoothing", "mixup"]
    assert why(explained, Event.AFTER_LOSS, "mixup")[1].startswith("in reverse order, as this event closes")
    assert why(explained, Event.AFTER_LOSS, "train_metrics") == ["the Trainer's own hooks run before callbacks"]
    assert why(explained, Event.FIT_START, "progress_bar") == ["destinations come last", "in the order given"]
    assert why(explained, Event.INIT, "mlflow_logger")[0] == "destinations come first, so that all can log"
    reasons = ["algorithms come last", "before label_smoothing, by LabelSmoothing.runs_after"]
    assert why(explained, Event.INIT, "mixup") == reasons
    assert why(explained, Event.PREDICT_AFTER_FORWARD, "all") == []  # the only hook


def test_each_hook_is_described_by_the_docstring_of_its_class_or_method():
    explained = explain(
        *("model=mlp", f"+algorithms.wrapper._target_={OWN}.Wrapper", "callbacks=none"),
        *(f"+callbacks.all._target_={OWN}.AllEvents", "+callbacks.all.color=red"),
        f"+algorithms.own_match._target_={OWN}.OwnMatch",
    )
    hooks = {row["name"]: row for row in explained["hooks"]}
    assert hooks["wrapper"] == {
        "name": "wrapper",
        "kind": "algorithm",
        "class": f"{__name__}.Wrapper",
        "does": "Wraps the loss.",
    }
    assert (hooks["all"]["kind"], hooks["all"]["does"], hooks["train_metrics"]["kind"]) == ("callback", None, "trainer")
    does = {(row["event"], hook["name"]): hook["does"] for row in explained["events"] for hook in row["runs"]}
    assert does["before_loss", "wrapper"] == "Encodes the targets."
    assert does["after_loss", "wrapper"] is None
    assert does["epoch_end", "all"] == "Records the event."
    assert does["batch_start", "own_match"] == "Starts a batch."
    assert does["epoch_end", "own_match"] == "Changes the state."
    assert explained["unchecked"] == ["callbacks.all.color"]
    when = {row["event"]: row["when"] for row in explained["events"]}
    assert (when["fit_start"], when["before_loss"], when["epoch_end"]) == ("once", "each microbatch", "each epoch")


def test_all_conflicts_are_listed_without_calling_hooks():
    explained = explain(
        *("+algorithms=[ema,mixup]", f"+algorithms.wrapper._target_={OWN}.Wrapper"),
        *(f"+callbacks.all._target_={OWN}.AllEvents", f"+callbacks.to._target_={OWN}.Destination"),
    )
    assert explained["conflicts"] == ["Wrapper.conflicts_with names EMA", "Wrapper.conflicts_with names MixUp"]
    assert {"ema", "mixup", "wrapper"} <= {hook["name"] for hook in explained["hooks"]}
    cycle = [f"+algorithms.{name.lower()}._target_={OWN}.{name}" for name in ("First", "Second")]
    explained = explain(*cycle, "callbacks=none")
    assert "form a cycle in runs_before/runs_after" in explained["conflicts"][0]
    assert runs(explained, Event.BATCH_START) == ["first", "second"]
    explained = explain(f"model._target_={OWN}.Stepping", "callbacks=none", "algorithms=label_smoothing")
    assert "Stepping" in explained["conflicts"][0]


def test_the_table_shows_only_events_with_hooks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    print_tables("a run", explain("+algorithms=mixup", f"+algorithms.wrapper._target_={OWN}.Wrapper"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a run"
    (row,) = (line for line in lines if line.startswith("BEFORE_LOSS"))
    assert "each microbatch" in row and "wrapper: Encodes the" in " ".join(" ".join(lines).split())
    assert not any(line.startswith("BEFORE_BACKWARD") for line in lines)  # no hook runs there
    assert any("cannot be combined: Wrapper.conflicts_with names MixUp" in line for line in lines)
    assert "--json lists them" in lines[-1]


@pytest.mark.slow
def test_standard_output_is_json_and_no_files_are_left(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(LOUD)
    finished = run_app("explain", "--json", "model=mlp", "+callbacks.loud._target_=own.Loud")
    assert set(json.loads(finished.stdout)["result"]) == {"hooks", "events", "conflicts", "unchecked"}
    assert "loud" in finished.stderr
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    finished = run_python([*ranks, "explain", "--json", "model=mlp"], cwd=tmp_path, check=True)
    assert len(json.loads(finished.stdout)["result"]["events"]) == len(Event)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"own.py", "scratch"}
