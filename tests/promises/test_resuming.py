"""A resumed run gives the same bits as one that never stopped.

Runs are killed at any batch and event, in one process and on two ranks, and with every callback and algorithm of conf/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import KILLED, Left, assert_equal, logged, read
from sessions import CONF, fit, list_events, train_config
from stores import query
from tiers import fast

BATCHES = 20  # of the 24 in three epochs: the EarlyStopper ends training here
FAILED = 1  # exit code of a rank whose neighbor was killed
# Without `compile`, which takes a minute and produces code that depends on the shapes of earlier batches.
HOOKS = [
    (group, path.stem)
    for group in ("callbacks", "algorithms")
    for path in sorted((CONF / group).glob("[!_]*.yaml"))
    if path.stem not in ("none", "compile")
]
IMAGES = ("model=resnet8", "model.module.width=8", "data=synthetic_images", "data.size=8", "data.channels=1")
TEXT = ("model=gpt", "model.module.d_model=8", "model.module.dropout=0.1", "data=synthetic_tokens", "data.context=16")
SMALL = (
    *("data.num_samples=100", "data.batch_size=13", "data.eval_samples=32", "data.eval_batch_size=32"),
    *("trainer.max_duration=2ep", "trainer.eval_interval=4ba", "callbacks.checkpoint_saver.save_interval=3ba"),
)
"""Two epochs of seven full batches and one of nine samples."""
NORMALIZED = ("mean=0.5", "std=0.15")  # the images have a standard deviation of 1.4, so this assumes values in [0, 1]
SETTINGS: dict[str, tuple[str, ...]] = {
    "activation_monitor": ("interval=2ba",),
    "alibi": ("max_sequence_length=16",),
    "augmix": NORMALIZED,
    "blurpool": ("min_channels=1",),
    "early_stopper": ("min_delta=1.0", "patience=7ba"),
    "ema": ("half_life=3ba",),
    "image_visualizer": ("interval=3ba",),
    "factorize": ("min_channels=8",),
    "generate": ("prompts=[a]", "max_new_tokens=4"),
    "low_precision_group_norm": ("allow_no_match=true",),
    "load_checkpoint": ("checkpoint=earlier",),
    "mlflow_logger": ("tracking_uri=sqlite:///mlflow.db", "log_system_metrics=false"),
    "optimizer_monitor": ("batch_log_interval=2",),
    "rand_augment": NORMALIZED,
    "state_digest": ("interval=1ba",),
    "squeeze_excite": ("min_channels=4", "latent_channels=2"),
    "stochastic_depth": ("target_block=BasicBlock", "drop_rate=0.5"),
    "swa": ("update_interval=2ba",),
    "system_metrics_monitor": ("interval=2ba",),
    "threshold_stopper": ("threshold=1.75",),
    "torch_profiler": ("skip_first=1", "active=2"),
    "trivial_augment": NORMALIZED,
}
"""Arguments that are required, or without which a callback or algorithm does nothing within two epochs."""
LANGUAGE_MODEL_HOOKS = (
    *("alibi", "gated_linear_units", "generate", "gyro_dropout", "low_precision_layer_norm", "ngram_embedding"),
    *("qk_norm", "rotary_embedding", "seq_length_warmup", "value_embedding"),
)
PACKAGES = {"mlperf_callback": "mlperf_logging", "tensorboard_logger": "tensorboard", "wandb_logger": "wandb"}
HOOKS_WITH_SESSION_FILES = ("event_trace", "tensorboard_logger", "torch_profiler", "wandb_logger")
"""Callbacks that begin new files in each session, so that a resumed run has more files."""
TIMED = re.compile(r"time/(train|val|total|remaining)|throughput/|memory/|system/")
"""Metrics that differ between any two runs."""


@pytest.fixture
def whole(sessions: Any, tmp_path: Path) -> Left:
    """The results of a run that is not killed."""
    sessions.run(fit, run_dir=tmp_path / "whole")
    return read(tmp_path / "whole")


def kill_and_resume(sessions: Any, folder: Path, kills: Sequence[tuple[str, int]], **arguments: Any) -> list[Path]:
    """Kill a run at each (event, batch), resume it until its end, and return the folders of these runs."""
    runs = [folder / f"{event}-{batch}" for event, batch in kills]
    first = [
        {"run_dir": run, "kill": {"event": event, "batch": batch}, **arguments}
        for run, (event, batch) in zip(runs, kills, strict=True)
    ]
    sessions.run_each(fit, first, ends=KILLED)
    sessions.run_each(fit, [{"run_dir": run, **arguments} for run in runs])
    return runs


def test_the_tested_run_stops_early_and_shuffles_each_epoch(whole: Left):
    """So a resumed run must restore the stopper's history, the order of the samples, and the random numbers."""
    assert whole.outcome["stopped"] and whole.outcome["counts"]["batch"] == BATCHES
    assert whole.outcome["stopper"]["best_at"]["ba"] == 12
    epochs = [[*chain.from_iterable(whole.ids[first : first + 8])] for first in (0, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(1050)] and epochs[0] != epochs[1]
    losses = [entry["value"] for entry in whole.logged if entry["key"] == "loss/train/total"]
    assert len(losses) == BATCHES == len({*losses})


@pytest.mark.parametrize("first", fast(range(1, 5), 1))
def test_a_kill_at_any_batch_changes_nothing(sessions: Any, tmp_path: Path, whole: Left, first: int):
    """Every fourth batch, beginning with `first`; the four cases together cover all batches."""
    kills = [("batch_end", batch) for batch in range(first, BATCHES + 1, 4)]
    for run in kill_and_resume(sessions, tmp_path, kills, save_interval="3ba"):
        assert_equal(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_kill_changes_nothing_if_every_batch_is_saved(sessions: Any, tmp_path: Path, whole: Left, asynchronous: bool):
    kills = [("batch_end", batch) for batch in range(1, BATCHES + 1, 3 if asynchronous else 1)]
    for run in kill_and_resume(sessions, tmp_path, kills, save_interval="1ba", asynchronous=asynchronous):
        assert_equal(run, whole)


@pytest.mark.slow
def test_a_kill_at_any_event_changes_nothing(sessions: Any, tmp_path: Path, whole: Left):
    """Every event that a run fires, each at a batch of its own, spread over the run."""
    sessions.run(list_events, run_dir=tmp_path / "events")
    fired: dict[str, list[int]] = {}
    for event, batch in json.loads((tmp_path / "events" / "events.json").read_text()):
        fired.setdefault(event, []).append(batch)
    assert len(fired) > 25
    assert fired.pop("fit_end") == [BATCHES]  # tested on its own, below
    kills = [(event, batches[index * 7 % len(batches)]) for index, (event, batches) in enumerate(sorted(fired.items()))]
    for run in kill_and_resume(sessions, tmp_path, kills):
        assert_equal(run, whole)


@pytest.mark.slow
def test_a_run_killed_in_every_session_ends_like_an_uninterrupted_one(sessions: Any, tmp_path: Path, whole: Left):
    """Each session trains one or two batches before it is killed at a later batch than the previous session."""
    events = ["after_loss", "batch_checkpoint", "before_dataloader", "batch_end", "after_backward"]
    for batch in range(1, BATCHES):
        kill = {"event": events[batch % len(events)], "batch": batch}
        sessions.run(fit, ends=KILLED, run_dir=tmp_path / "run", save_interval="1ba", kill=kill)
    sessions.run(fit, run_dir=tmp_path / "run", save_interval="1ba")
    assert_equal(tmp_path / "run", whole)


def test_a_kill_after_the_last_checkpoint_does_not_undo_an_early_stop(sessions: Any, tmp_path: Path, whole: Left):
    (run,) = kill_and_resume(sessions, tmp_path, [("fit_end", BATCHES)])
    assert_equal(run, whole)


@pytest.mark.parametrize("rank", fast([1, 0, None], 1))
def test_a_kill_of_ranks_changes_nothing(sessions: Any, tmp_path: Path, rank: int | None):
    """Both ranks are killed, as when the machine fails, or one of them, for which the other then waits in vain."""
    sessions.run(fit, ranks=2, run_dir=tmp_path / "whole")
    whole = read(tmp_path / "whole")
    assert whole.outcome["stopped"] and whole.outcome["counts"]["batch"] == BATCHES
    kills = [("batch_end", 4), ("before_backward", 9), ("eval_after_forward", 16), ("after_forward", 19)]
    ends = {None: [KILLED, KILLED], 0: [KILLED, FAILED], 1: [FAILED, KILLED]}[rank]
    runs = [tmp_path / event for event, _ in kills]
    calls = [
        {"run_dir": run, "kill": {"event": event, "batch": batch, "rank": rank}}
        for run, (event, batch) in zip(runs, kills, strict=True)
    ]
    sessions.run_each(fit, calls, ranks=2, ends=ends)
    sessions.run_each(fit, [{"run_dir": run} for run in runs], ranks=2)
    for run in runs:
        assert_equal(run, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_run_resumes_on_another_number_of_ranks(sessions: Any, tmp_path: Path, before: int, after: int):
    """Samples are the same and numbers equal up to rounding; the last batch of an epoch has no sample for one rank."""
    sessions.run(fit, ranks=before, run_dir=tmp_path / "whole", chance=False)
    whole = read(tmp_path / "whole")
    assert whole.outcome["counts"]["batch"] == BATCHES and len(whole.ids[7]) == 1
    for event, batch in (("batch_end", 4), ("after_loss", 8), ("after_loss", 14)):
        run = tmp_path / f"{event}-{batch}"
        sessions.run(fit, ranks=before, ends=KILLED, run_dir=run, chance=False, kill={"event": event, "batch": batch})
        sessions.run(fit, ranks=after, run_dir=run, chance=False)
        assert_close(read(run), whole)


def assert_close(left: Left, whole: Left) -> None:
    assert left.ids == whole.ids
    torch.testing.assert_close(left.outcome, whole.outcome, rtol=1e-7, atol=1e-10)
    assert [line["step"] for line in left.logged] == [line["step"] for line in whole.logged]
    losses, expected = (
        [entry["value"] for entry in run.logged if entry["key"] == "loss/eval/total"] for run in (left, whole)
    )
    assert losses == pytest.approx(expected, rel=1e-6)


def comparable_entries(run: Path, with_files: bool) -> list[dict[str, Any]]:
    """Return the values that a run logged, and optionally its files; without its config and metrics of time."""
    entries = []
    for entry in logged(run):
        if "artifact" in entry:
            entry["artifact"] = str(Path(entry["artifact"]).relative_to(run))
        is_file = "artifact" in entry or "table" in entry
        if (is_file and with_files) or ("key" in entry and not TIMED.match(entry["key"])):
            entries.append(entry)
    return entries


def list_files(run: Path) -> dict[str, str | None]:
    """Return the files in a run's folder, except checkpoints; `digests.jsonl` with its text, the others with None."""
    paths = [path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    return {str(path.relative_to(run)): path.read_text() if path.name == "digests.jsonl" else None for path in paths}


def assert_mlflow_equal(folder: Path) -> None:
    """Assert that the store holds two finished runs with the same points, none of them twice."""
    store = folder / "mlflow.db"
    runs = query(store, "select run_uuid, status from runs")
    logged = "select key, step, value from metrics where run_uuid = ? order by key, step"
    points = [query(store, logged, run) for run, _ in runs]
    assert [status for _, status in runs] == ["FINISHED"] * 2
    first, second = ([point for point in run_points if not TIMED.match(point[0])] for run_points in points)
    assert first == second and len({point[:2] for point in first}) == len(first) > 50


def arguments_of(group: str, name: str) -> list[str]:
    """Return the overrides of a small run with a callback or algorithm; skip the test if it cannot run here."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    if name in ("cuda_graph", "cudnn_benchmark", "float8") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    hooks = {"callbacks": ["checkpoint_saver", "json_lines_logger"], "algorithms": []}
    hooks[group] += [name] if name not in hooks[group] else []
    overrides = [*(TEXT if name in LANGUAGE_MODEL_HOOKS else IMAGES), *SMALL]
    overrides += ["trainer.precision=amp_bf16"] if name.startswith("low_precision") else []
    overrides += [f"{key}=[{','.join(names)}]" for key, names in hooks.items()]
    return overrides + [f"{group}.{name}.{setting}" for setting in SETTINGS.get(name, ())]


def assert_equal_runs(name: str, killed: Path, whole: Path) -> None:
    """Assert that a resumed run and an uninterrupted one are bit-identical, with everything that they logged."""
    outcome, expected = (torch.load(run / "outcome.pt", weights_only=True) for run in (killed, whole))
    torch.testing.assert_close(outcome, expected, rtol=0, atol=0)
    with_files = name not in HOOKS_WITH_SESSION_FILES
    assert comparable_entries(killed, with_files) == comparable_entries(whole, with_files)
    if with_files:
        assert list_files(killed) == list_files(whole)
    if name == "mlflow_logger":
        assert_mlflow_equal(killed.parent)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), HOOKS)
def test_a_kill_changes_nothing_with_any_callback_or_algorithm(sessions: Any, tmp_path: Path, group: str, name: str):
    overrides = arguments_of(group, name)
    if name == "load_checkpoint":
        plain = arguments_of(group, "checkpoint_saver")
        sessions.run(train_config, run_dir=tmp_path / "earlier", overrides=plain)
    kill = ("_target_=sessions.Kills", "event=before_backward", "batch=11")
    kills = [f"+callbacks.kills.{setting}" for setting in kill]
    first = sessions.start(train_config, run_dir=tmp_path / "whole", overrides=overrides)
    second = sessions.start(train_config, run_dir=tmp_path / "killed", overrides=[*overrides, *kills])
    codes = sessions.wait([first, second])
    assert codes == [0, KILLED], first.log.read_text() + second.log.read_text()
    sessions.run(train_config, run_dir=tmp_path / "killed", overrides=overrides)
    assert_equal_runs(name, tmp_path / "killed", tmp_path / "whole")
