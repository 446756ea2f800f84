"""`runner explain`: who runs when and why, held against the engine of a real run."""

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


class Wrapper(Algorithm):
    """Wraps the loss.

    More than one line.
    """

    runs_before = ("LabelSmoothing",)
    conflicts_with = ("EMA", "MixUp")

    def before_loss(self, state: Any, logger: Any) -> None:
        """Puts something around the targets."""

    def after_loss(self, state: Any, logger: Any) -> None: ...


class Everywhere(Callback):
    def __init__(self, **options: Any) -> None:
        print("a constructor that prints")

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        """Notes what happens."""
        raise AssertionError("called")

    def close(self, state: Any, logger: Any) -> None:
        raise AssertionError("called")


class Asked(Algorithm):
    def match(self, event: Event, state: Any) -> bool:
        raise AssertionError("asked")

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        """Does something."""

    def batch_start(self, state: Any, logger: Any) -> None:
        """Begins a batch."""


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
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])


def runs(explained: dict[str, Any], event: Event) -> list[str]:
    """The names of the hooks that run at an event."""
    (found,) = (one for one in explained["events"] if one["event"] == event)
    return [one["name"] for one in found["runs"]]


def why(explained: dict[str, Any], event: Event, name: str) -> list[str]:
    (found,) = (one for one in explained["events"] if one["event"] == event)
    return next(one["why"] for one in found["runs"] if one["name"] == name)


@pytest.mark.parametrize(
    "overrides",
    [
        ("+callbacks=[speed_monitor,early_stopper,lr_monitor]", "~callbacks.mlflow_logger"),
        ("callbacks=none",),
        ("model=gpt", "data=synthetic_tokens", "algorithms=gradient_clipping", "callbacks=checkpoint_saver"),
    ],
    ids=str,
)
def test_the_timeline_is_that_of_the_real_run(tmp_path: Path, overrides: tuple[str, ...]):
    config = composed(f"+algorithms.wrapper._target_={OWN}.Wrapper", *overrides)
    explained = timeline(Experiment(config))
    assert [one["event"] for one in explained["events"]] == [*Event]
    with build.build(Experiment(config), tmp_path / "run", "") as trainer:
        for event in Event:
            assert runs(explained, event) == [one.config_key for one in trainer.engine.listeners(event)], event
        everyone = [*trainer.state.algorithms, *trainer.state.callbacks, *trainer.state.loggers]
    assert [one["name"] for one in explained["hooks"]] == [one.config_key for one in everyone]
    assert explained["conflicts"] == explained["unchecked"] == []


def test_each_place_has_its_reason():
    explained = timeline(Experiment(composed("+algorithms=mixup", f"+callbacks.all._target_={OWN}.Everywhere")))
    assert runs(explained, Event.BEFORE_LOSS) == ["mixup", "label_smoothing", "all"]
    place = "algorithms come first"
    assert why(explained, Event.BEFORE_LOSS, "mixup") == [place, "before label_smoothing, by LabelSmoothing.runs_after"]
    assert why(explained, Event.BEFORE_LOSS, "label_smoothing")[1] == "after mixup, by LabelSmoothing.runs_after"
    assert runs(explained, Event.AFTER_LOSS)[:2] == ["label_smoothing", "mixup"]
    assert why(explained, Event.AFTER_LOSS, "mixup")[1].startswith("in reverse order, as this event closes")
    assert why(explained, Event.AFTER_LOSS, "train_metrics") == ["the trainer's own come before callbacks"]
    assert why(explained, Event.FIT_START, "progress_bar") == ["destinations come last", "in the order given"]
    assert why(explained, Event.INIT, "mlflow_logger")[0] == "destinations come first, so that all can log"
    reasons = ["algorithms come last", "before label_smoothing, by LabelSmoothing.runs_after"]
    assert why(explained, Event.INIT, "mixup") == reasons
    assert why(explained, Event.PREDICT_BATCH_END, "all") == []  # alone


def test_what_each_does_is_what_its_own_documentation_says():
    explained = timeline(
        Experiment(
            composed(
                *("model=mlp", f"+algorithms.wrapper._target_={OWN}.Wrapper", "callbacks=none"),
                *(f"+callbacks.all._target_={OWN}.Everywhere", "+callbacks.all.color=red"),
                f"+algorithms.asked._target_={OWN}.Asked",
            )
        )
    )
    hooks = {one["name"]: one for one in explained["hooks"]}
    assert hooks["wrapper"] == {
        "name": "wrapper",
        "kind": "algorithm",
        "class": f"{__name__}.Wrapper",
        "does": "Wraps the loss.",
    }
    assert (hooks["all"]["kind"], hooks["all"]["does"], hooks["train_metrics"]["kind"]) == ("callback", None, "trainer")
    does = {(event["event"], one["name"]): one["does"] for event in explained["events"] for one in event["runs"]}
    assert does["before_loss", "wrapper"] == "Puts something around the targets."
    assert does["after_loss", "wrapper"] is None
    assert does["epoch_end", "all"] == "Notes what happens."
    assert (does["batch_start", "asked"], does["epoch_end", "asked"]) == ("Begins a batch.", "Does something.")
    assert explained["unchecked"] == ["callbacks.all.color"]
    whens = {one["event"]: one["when"] for one in explained["events"]}
    assert (whens["fit_start"], whens["before_loss"], whens["epoch_end"]) == ("once", "each microbatch", "each epoch")


def test_all_conflicts_are_told_and_nobody_is_called():
    explained = timeline(
        Experiment(
            composed(
                *("+algorithms=[ema,mixup]", f"+algorithms.wrapper._target_={OWN}.Wrapper"),
                *(f"+callbacks.all._target_={OWN}.Everywhere", f"+callbacks.to._target_={OWN}.Destination"),
            )
        )
    )
    assert explained["conflicts"] == ["Wrapper.conflicts_with names EMA", "Wrapper.conflicts_with names MixUp"]
    assert {"ema", "mixup", "wrapper"} <= {one["name"] for one in explained["hooks"]}
    explained = timeline(
        Experiment(
            composed(
                *(f"+algorithms.{name.lower()}._target_={OWN}.{name}" for name in ("First", "Second")), "callbacks=none"
            )
        )
    )
    assert "form a cycle in runs_before/runs_after" in explained["conflicts"][0]
    assert runs(explained, Event.BATCH_START) == ["first", "second"]
    explained = timeline(
        Experiment(composed(f"model._target_={OWN}.Stepping", "callbacks=none", "algorithms=label_smoothing"))
    )
    assert "Stepping" in explained["conflicts"][0]


def test_the_table_shows_who_listens_and_how_to_see_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "120")
    print_tables(
        "a run", timeline(Experiment(composed("+algorithms=mixup", f"+algorithms.wrapper._target_={OWN}.Wrapper")))
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a run"
    (place,) = (index for index, line in enumerate(lines) if line.startswith("BEFORE_LOSS"))
    assert "each microbatch" in lines[place] and "wrapper: Puts something" in " ".join(" ".join(lines).split())
    assert not any(line.startswith("BEFORE_BACKWARD") for line in lines)  # nobody listens
    assert any("cannot be combined: Wrapper.conflicts_with names MixUp" in line for line in lines)
    assert "--json lists them" in lines[-1]


@pytest.mark.slow
def test_standard_output_is_json_and_nothing_is_left(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(
        "from runner import Callback\n\n\nclass Loud(Callback):\n    def __init__(self):\n"
    )
    with (tmp_path / "own.py").open("a") as file:
        file.write("        print('loud')\n")
    done = run_app("explain", "--json", "model=mlp", "+callbacks.loud._target_=own.Loud")
    assert set(json.loads(done.stdout)["result"]) == {"hooks", "events", "conflicts", "unchecked"}
    assert "loud" in done.stderr
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    several = run_python([*ranks, "explain", "--json", "model=mlp"], cwd=tmp_path, check=True)
    assert len(json.loads(several.stdout)["result"]["events"]) == len(Event)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"own.py", "scratch"}
