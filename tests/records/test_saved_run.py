from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.records.record import write_record
from runner.records.saved_run import SavedRun, begun_again, find_saved_run, with_latest, with_saved_overrides

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("trainer.max_duration=2ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")
QUIET = ("callbacks=[checkpoint_saver]",)
LONGER = "trainer.max_duration=3ep"

KEPT = ["model=mlp", "optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"]


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        ("resume=x", KEPT, ["resume=x"]),
        (LONGER, KEPT, [LONGER]),
        ("optimizer.lr=1", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer.lr=1"]),
        ("optimizer=adam", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer=adam"]),
        ("model=gpt", ["optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"], ["model=gpt"]),
        ("callbacks=none", ["model=mlp", "optimizer.lr=0.5"], ["callbacks=none"]),
        ("~callbacks.progress_bar", KEPT[:3], ["~callbacks.progress_bar"]),
        ("~optimizer.lr", KEPT, ["~optimizer.lr"]),
        ("+callbacks=b", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a,b]", "~callbacks.progress_bar"], []),
        ("+callbacks=a", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a]", "~callbacks.progress_bar"], []),
    ],
)
def test_what_is_given_again_replaces_what_was_saved(given: str, before: list[str], after: list[str]):
    saved = SavedRun("x", "x", "x", {}, KEPT)
    assert with_saved_overrides(saved, [given]) == [*before, *after]
    assert with_saved_overrides(saved, ["-m", "--config-dir", "x", given]) == [
        "-m",
        "--config-dir",
        "x",
        *before,
        *after,
    ]


NOW = {"mode": "train", "resume": None, "rerun": "x", "seed": 0, "new": None, "data": {"size": 9, "more": 1}}
THEN = {"seed": 4, "data": {"size": 3, "gone": 2, "of": {"deep": 1}}}


@pytest.mark.parametrize(
    ("typed", "composed", "expected"),
    [
        ([], NOW, THEN),  # conf/ says otherwise by now
        (["data.size=5"], NOW | {"data": {"size": 5, "more": 1}}, THEN | {"data": THEN["data"] | {"size": 5}}),
        (["data.size=9"], NOW, THEN | {"data": THEN["data"] | {"size": 9}}),  # which conf/ says by now as well
        (["+data.x=1"], NOW | {"data": NOW["data"] | {"x": 1}}, THEN | {"data": THEN["data"] | {"x": 1}}),
        (["~data.gone"], NOW, THEN | {"data": {"size": 3, "of": {"deep": 1}}}),
        (["~data"], {key: value for key, value in NOW.items() if key != "data"}, {"seed": 4}),
        (["data=other"], NOW | {"data": {"size": 3}}, THEN | {"data": {"size": 3}}),
        (["+callbacks=a"], NOW | {"callbacks": {"a": {}}}, THEN | {"callbacks": {"a": {}}}),
        (["+data.of.deep=2"], NOW | {"data": NOW["data"] | {"of": {"deep": 2}}}, None),
    ],
)
def test_what_is_typed_changes_the_record_and_nothing_else_does(
    typed: list[str], composed: dict[str, Any], expected: dict[str, Any] | None
):
    saved = SavedRun("x", "x", "x", THEN, [], NOW)
    before = json.dumps(THEN)
    config = begun_again(saved, composed, ["model=mlp", *typed])
    of_now = {"mode": "train", "resume": None, "rerun": "x", "new": None}
    expected = expected or THEN | {"data": THEN["data"] | {"of": {"deep": 2}}}
    assert config == of_now | expected
    assert json.dumps(THEN) == before


def test_what_a_run_was_told_to_do_is_not_taken_from_its_record(tmp_path: Path):
    told = ["mode=train", "predict.format=pt", "explain.format=json", "skip_finished=false"]
    saved = find_saved_run([f"rerun={foreign_run(tmp_path / 'run', {}, [*told, 'seed=3'])}"])
    assert saved is not None and saved.overrides == ["seed=3"]


def test_without_a_record_there_is_nothing_to_begin_again(tmp_path: Path):
    for arguments in (["seed=1"], [f"resume={tmp_path}"], ["resume=missing", "seed=1"], ["resume="], ["resume=null"]):
        assert find_saved_run(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["rerun=missing"], "rerun='missing': no such folder"),
        (["rerun=."], "rerun='.': no record"),
        (["rerun=a,b"], "one run at a time"),
        (["rerun=a", "resume=b"], "give one of them"),
        (["rerun=" + "0" * 32, "~callbacks.mlflow_logger"], "neither a folder, nor a run"),
        (["resume=" + "abcdef01" * 4], "neither a folder, nor a run"),
        (["rerun=" + "0" * 32, "callbacks.mlflow_logger.tracking_uri=http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_found_is_one_message(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        find_saved_run(arguments)
    assert part in str(raised.value)
    assert list(tmp_path.iterdir()) == []


# A record of somebody else: config and overrides, and what the refusal must name.
CLEAN = {"model": {"_target_": "runner.ClassificationModel", "module": {"_target_": "runner.models.MLP"}}}
ATTACKS: dict[str, tuple[Any, list[str], str]] = {
    "a callback": ({"callbacks": {"x": {"_target_": "own.Evil"}}}, [], "own.Evil"),
    "a nested argument": (
        {"model": {"_target_": "torch.nn.ReLU", "a": [{"b": {"_target_": "own.Evil"}}]}},
        [],
        "own.Evil",
    ),
    "a partial": ({"optimizer": {"_target_": "os.system", "_partial_": True}}, [], "os.system"),
    "through torch": ({"data": {"_target_": "torch.os.system", "_args_": ["touch x"]}}, [], "torch.os.system"),
    "torch itself": ({"data": {"_target_": "torch.load", "f": "x"}}, [], "torch.load"),
    "torch hub": ({"model": {"_target_": "torch.hub.load"}}, [], "torch.hub.load"),
    "through this project": (
        {"data": {"_target_": "runner.processes.launch.os.system"}},
        [],
        "runner.processes.launch.os.system",
    ),
    "no string": ({"data": {"_target_": ["own", "Evil"]}}, [], "own"),
    "an interpolation": ({"data": "${oc.create:{_target_:own.Evil}}"}, [], "oc.create"),
    "an override": ({}, ["+callbacks.x._target_=own.Evil"], "own.Evil"),
    "an override with a mapping": ({}, ["+callbacks.x={_target_:own.Evil}"], "own.Evil"),
}


def foreign_run(folder: Path, config: Any, overrides: Sequence[str]) -> Path:
    """A run's folder as another user would have made it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CLEAN | config))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([*overrides]))
    return folder


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that exists once the module `own` of the working directory was imported."""
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath('imported').touch()\ndef Evil(**_): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path / "imported"


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("key", ["resume", "rerun"])
def test_somebody_else_s_record_runs_nothing_unasked(attack: str, key: str, evil: Path, tmp_path: Path):
    config, overrides, named = ATTACKS[attack]
    folder = foreign_run(tmp_path / "run", config, overrides)
    with pytest.raises(ValueError, match="made by someone else") as raised:
        find_saved_run([f"{key}={folder}"])
    assert named in str(raised.value) and "allow_targets=[" in str(raised.value)
    assert not evil.exists()


def test_what_was_refused_runs_once_it_is_allowed(evil: Path, tmp_path: Path):
    folder = foreign_run(tmp_path / "run", ATTACKS["a callback"][0], [])
    for allowed in ("allow_targets=[own.Evil]", "allow_targets=own.*", "allow_targets=[a.B,own.*]"):
        saved = find_saved_run([f"rerun={folder}", allowed])
        assert saved is not None and saved.config["callbacks"] == {"x": {"_target_": "own.Evil"}}
    for other in ("allow_targets=[own.Other]", "allow_targets=own", "allow_targets=[]"):
        with pytest.raises(ValueError, match=r"own\.Evil"):
            find_saved_run([f"rerun={folder}", other])
    assert not evil.exists()


def test_a_record_cannot_allow_itself_or_touch_hydra(evil: Path, tmp_path: Path):
    config = ATTACKS["a callback"][0] | {"allow_targets": ["own.*"], "mode": "train"}
    folder = foreign_run(tmp_path / "run", config, ["allow_targets=[own.*]"])
    with pytest.raises(ValueError, match=r"own\.Evil"):
        find_saved_run([f"resume={folder}"])
    hydra = ["hydra/launcher=joblib", "+hydra.sweeper._target_=own.Evil", "hydra.searchpath=[file:///tmp]", "-m"]
    saved = find_saved_run([f"resume={foreign_run(tmp_path / 'other', {}, [*hydra, 'model=mlp'])}"])
    assert saved is not None and saved.overrides == ["model=mlp"]


def test_what_ships_and_what_this_user_made_needs_no_permission(
    evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    harmless = {"callbacks": {"a": {"_target_": "callbacks.SpeedMonitor"}}, "loss": {"_target_": "torch.nn.MSELoss"}}
    assert find_saved_run([f"rerun={foreign_run(tmp_path / 'harmless', harmless, [])}"]) is not None
    run_dir = tmp_path / "mine"
    write_record(run_dir, CLEAN | {"x": {"_target_": "own.Evil"}}, ["seed=1"])
    assert find_saved_run([f"rerun={run_dir}"]) is not None
    assert find_saved_run([f"resume={run_dir}"]) is not None
    for name in ("config.yaml", "overrides.yaml"):  # changed by someone since
        before = (run_dir / name).read_text()
        (run_dir / name).write_text(before + "\n")
        with pytest.raises(ValueError, match=r"own\.Evil"):
            find_saved_run([f"rerun={run_dir}"])
        (run_dir / name).write_text(before)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
    with pytest.raises(ValueError, match=r"own\.Evil"):
        find_saved_run([f"rerun={run_dir}"])
    assert not evil.exists()


def weights(run_dir: Path, checkpoint: str = "ep2-ba6") -> str:
    return hashlib.sha256((run_dir / "checkpoints" / checkpoint / "model.pt").read_bytes()).hexdigest()


def tree(run_dir: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*")}


def folders(folder: Path) -> set[Path]:
    return set(folder.glob("outputs/20*/*"))


@pytest.mark.slow
def test_a_rerun_is_the_same_experiment_whatever_conf_has_become(tmp_path: Path, run_app: Any):
    for name in ("runner", "callbacks", "algorithms", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "changed" / name)
    start = (*SHORT, *QUIET, "optimizer.momentum=0.8", "scheduler=none")
    run_app(*start)
    (first,) = folders(tmp_path)
    before = tree(first)

    env = {"PYTHONPATH": str(tmp_path / "changed")}
    conf = tmp_path / "changed" / "conf"
    for file, old, new in (
        ("optimizer/sgd.yaml", "lr: 0.1", "lr: 0.3"),
        ("model/mlp.yaml", "[128, 128]", "[16]"),
        ("config.yaml", "\nseed: 0", "\nseed: 8"),
    ):
        text = (conf / file).read_text()
        assert old in text
        (conf / file).write_text(text.replace(old, new))
    done = run_app(f"rerun={first.relative_to(tmp_path)}", env=env)
    (second,) = folders(tmp_path) - {first}
    assert weights(second) == weights(first)
    assert tree(first) == before
    (line,) = [line for line in done.stderr.splitlines() if "conf/ has changed" in line]
    assert "optimizer.lr: 0.1 -> 0.3" in line and "seed: 0 -> 8" in line and "momentum" not in line
    config, again = (yaml.safe_load((one / "config.yaml").read_text()) for one in (first, second))
    assert again.pop("rerun") == str(first.relative_to(tmp_path)) and config.pop("rerun") is None
    assert again == config

    run_app(f"rerun={second}", "optimizer.lr=0.3", "~algorithms.batch_augment", env=env)  # what conf/ says by now
    (third,) = folders(tmp_path) - {first, second}
    changed = yaml.safe_load((third / "config.yaml").read_text())
    assert changed.pop("rerun") == str(second)
    expected = config | {"optimizer": config["optimizer"] | {"lr": 0.3}}
    expected["algorithms"] = {"label_smoothing": config["algorithms"]["label_smoothing"]}
    assert changed == expected
    assert weights(third) != weights(first)

    # Resumed, it goes on as it was.
    run_app(f"resume={first}", LONGER, env=env)
    resumed = yaml.safe_load((first / "config.yaml").read_text())
    assert resumed["trainer"].pop("max_duration") == "3ep" and resumed.pop("resume") == str(first)
    assert config["trainer"].pop("max_duration") == "2ep" and config.pop("resume") is None
    assert resumed == config | {"rerun": None}
    assert yaml.safe_load((first / "sessions" / "1" / "config.yaml").read_text())["trainer"]["max_duration"] == "2ep"
    run_app(*start, LONGER, "hydra.run.dir=whole")
    assert weights(tmp_path / "whole", "ep3-ba9") == weights(first, "ep3-ba9")


@pytest.mark.slow
def test_a_run_is_found_by_its_mlflow_id(tmp_path: Path, run_app: Any):
    run_app(*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]", "run_name=mine")
    (first,) = folders(tmp_path)
    run_id = json.loads((first / "mlflow" / "sent.json").read_text())["run_id"]

    run_app(f"resume={run_id}", LONGER)
    assert folders(tmp_path) == {first}
    assert (first / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    evaluated = run_app("mode=eval", f"resume={run_id}")
    assert "ep3-ba9, after 9 batches" in evaluated.stdout
    (evaluation,) = folders(tmp_path) - {first}
    refused = run_app(f"resume={evaluation}", exit_code=2)
    assert "made by mode=eval" in refused.stderr and str(first / "checkpoints" / "ep3-ba9") in refused.stderr

    def rows(sql: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(tmp_path / "outputs" / "mlflow.db")) as store:
            found = store.execute(sql).fetchall()
            store.commit()
            return found

    tags = dict(rows(f"select key, value from tags where run_uuid = '{run_id}'"))
    assert tags["runner.run_dir"] == str(first)
    assert rows("select name, status from runs order by start_time") == [
        ("mine", "FINISHED"),
        ("eval-mine", "FINISHED"),
    ]
    assert (run_id,) in rows("select value from tags where key = 'runner.evaluates'")
    assert not rows("select key from params where key like '%run_dir%'")

    (record,) = tmp_path.glob(f"outputs/mlartifacts/{run_id}/artifacts/record")
    kept = [yaml.safe_load((record / one / "config.yaml").read_text()) for one in (".", "sessions/1")]
    assert [one["trainer"]["max_duration"] for one in kept] == ["3ep", "2ep"]

    # Its folder is gone: made again from the record that MLflow has.
    first.rename(tmp_path / "elsewhere")
    refused = run_app(f"resume={run_id}", exit_code=2)
    assert str(first) in refused.stderr and "rerun=" in refused.stderr and len(refused.stderr.splitlines()) == 1
    run_app(f"rerun={run_id}", "trainer.max_duration=2ep", *QUIET)
    (again,) = folders(tmp_path) - {first, evaluation}
    assert weights(again) == weights(tmp_path / "elsewhere")

    rows(f"update runs set lifecycle_stage = 'deleted' where run_uuid = '{run_id}'")
    for key in ("resume", "rerun"):
        refused = run_app(f"{key}={run_id}", exit_code=2)
        assert "is deleted" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert folders(tmp_path) == {evaluation, again}


# What a user wrote: kills the process, or gets it killed, at one place, unless the file `spared` exists.
OWN = """
import os, signal
from callbacks import CheckpointSaver
from runner import Callback


def end(state, logger):
    if not os.path.exists("spared"):
        logger.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class Killed(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.batch:
            end(state, logger)


class KilledAfterTheLast(CheckpointSaver):
    def fit_end(self, state, logger):
        super().fit_end(state, logger)
        end(state, logger)
"""


def status(run: Path) -> str:
    return json.loads((run / "result.json").read_text())["status"]


def in_mlflow(folder: Path) -> tuple[list[Any], list[int]]:
    """Statuses of all runs, and the steps at which they logged their losses, in order."""
    with contextlib.closing(sqlite3.connect(folder / "outputs" / "mlflow.db", timeout=30)) as store:
        statuses = store.execute("select status from runs").fetchall()
        steps = store.execute("select step from metrics where key = 'loss/train/total' order by step").fetchall()
    return [one for (one,) in statuses], [one for (one,) in steps]


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_from_the_start(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    start = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]")
    killer = ("+callbacks.own._target_=own.Killed", "+callbacks.own.batch=2")
    run_app(*start, *killer, "hydra.run.dir=run", exit_code=-signal.SIGKILL)
    run = tmp_path / "run"
    assert status(run) == "RUNNING" and not (run / "checkpoints").exists()
    refused = run_app("resume=run", "seed=1", exit_code=2)  # its first values are logged already
    assert refused.stderr.splitlines()[1].endswith("it was trained otherwise so far:")
    (run / "checkpoints" / ".ep1-ba3.partial-1").mkdir(parents=True)  # as if it had been in the middle of saving
    (run / "checkpoints" / ".ep1-ba3.partial-1" / "manifest.json").write_text('{"fil')

    (tmp_path / "spared").touch()
    done = run_app("resume=run")
    assert "INFO: resume='run': ended before its first checkpoint; it begins from the start\n" in done.stderr
    assert status(run) == "FINISHED" and in_mlflow(tmp_path) == (["FINISHED"], [1, 2, 3, 4, 5, 6])
    assert yaml.safe_load((run / "sessions" / "1" / "overrides.yaml").read_text()) == [*start, *killer]
    run_app(*SHORT, *QUIET, "hydra.run.dir=whole")
    assert weights(run) == weights(tmp_path / "whole")
    left = {path.name for path in tmp_path.glob("*")}
    assert left - {"__pycache__"} == {"own.py", "spared", "run", "whole", "outputs"}


@pytest.mark.slow
def test_where_there_are_checkpoints_nothing_begins_from_the_start(tmp_path: Path, run_app: Any):
    run_app(*SHORT, *QUIET, "hydra.run.dir=run", "callbacks.checkpoint_saver.folder=deep/er")
    before = tree(tmp_path / "run")
    refused = run_app("resume=run", exit_code=2)  # they are where its config says, and it is told where to look
    assert "no complete checkpoint there" in refused.stderr
    for manifest in (tmp_path / "run").rglob("manifest.json"):
        manifest.unlink()
    (tmp_path / "run" / "deep" / "er").rename(tmp_path / "run" / "checkpoints")
    refused = run_app("resume=run", exit_code=2)
    assert "complete: run/checkpoints/ep1-ba3, run/checkpoints/ep2-ba6" in refused.stderr
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused = run_app("resume=run", exit_code=2)
    assert "has finished and left no checkpoint; rerun=run" in refused.stderr
    assert {*tree(tmp_path / "run")} < {*before}
    (tmp_path / "never").mkdir()
    for folder in ("never", "outputs"):
        assert run_app(f"resume={folder}", exit_code=2).stderr.count("error: resume=") == 1


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished_quietly(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    callbacks = "callbacks=[mlflow_logger,checkpoint_saver,learning_curves]"
    killer = "callbacks.checkpoint_saver._target_=own.KilledAfterTheLast"
    run_app(*SHORT, callbacks, killer, "hydra.run.dir=run", exit_code=-signal.SIGKILL)
    run = tmp_path / "run"
    assert status(run) == "RUNNING" and not (run / "learning_curves.png").exists()
    before = weights(run)
    (tmp_path / "spared").touch()
    assert "INFO" not in run_app("resume=run").stderr
    assert status(run) == "FINISHED" and weights(run) == before and (run / "learning_curves.png").stat().st_size > 1000
    assert in_mlflow(tmp_path) == (["FINISHED"], [1, 2, 3, 4, 5, 6])
    result = json.loads((run / "result.json").read_text())
    assert result["objective_name"] == "eval/MulticlassAccuracy" and result["objective"] > 0
    refused = run_app("resume=run", exit_code=2)
    assert "'2ep' is reached: this run has finished" in refused.stderr
    assert refused.stderr.endswith("add trainer.max_duration=<more than 2ep>\n")
    assert status(run) == "FINISHED"


@pytest.mark.slow
def test_a_run_that_stopped_early_and_was_killed_then_does_not_train_on(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    stopper = (
        "+callbacks=early_stopper",
        "callbacks.early_stopper.min_delta=9",
        "callbacks.early_stopper.patience=1ba",
    )
    killer = "callbacks.checkpoint_saver._target_=own.KilledAfterTheLast"
    long = "trainer.max_duration=9ep"
    run_app(*SHORT, long, *QUIET, *stopper, killer, "hydra.run.dir=run", exit_code=-signal.SIGKILL)
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "ep2-ba6"
    (tmp_path / "spared").touch()
    run_app("resume=run")
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "ep2-ba6"
    assert status(tmp_path / "run") == "FINISHED"


@pytest.mark.slow
def test_a_restart_after_the_last_checkpoint_finishes_it(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "import os, signal\n"
        "from runner import Callback\n"
        "class Dying(Callback):\n"
        "    def post_close(self):\n"
        "        if not os.path.exists('died') and os.environ['RANK'] == '0':\n"
        "            open('died', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "-m", "runner")
    arguments = (*SHORT, *QUIET, "hydra.run.dir=run", "+callbacks.dying._target_=own.Dying")
    done = subprocess.run(
        [sys.executable, *torchrun, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists() and status(tmp_path / "run") == "FINISHED"
    assert "error" not in [line.partition(":")[0] for line in done.stderr.splitlines()]


def test_latest_is_the_run_that_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="resume='latest': no run in outputs/ has written a checkpoint"):
        with_latest(["resume=latest"])
    for age, folder in enumerate(("2026-01-01/10-00-00", "sweeps/2026-01-02/10-00-00/lr0.1", "of the Python API")):
        manifest = tmp_path / "outputs" / folder / "checkpoints" / "ep1-ba3" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (1000 - age, 1000 - age))
    assert with_latest(["-m", "resume=latest", "seed=1"]) == ["-m", "resume=outputs/2026-01-01/10-00-00", "seed=1"]
    assert capsys.readouterr().err == "INFO: resume=latest: outputs/2026-01-01/10-00-00\n"
    assert with_latest(["rerun=latest"]) == ["rerun=outputs/2026-01-01/10-00-00"]
    for given in (["resume=./latest"], ["resume=outputs/latest"], ["run_name=latest"], ["resume=latest/x"], []):
        assert with_latest(given) == given


@pytest.mark.slow
def test_latest_stands_for_a_run_in_every_mode(tmp_path: Path, run_app: Any):
    run_app("-m", *SHORT, *QUIET, "seed=0,1")
    (job,) = tmp_path.glob("outputs/sweeps/*/*/digits-seed1")
    said = f"INFO: resume=latest: {job.relative_to(tmp_path)}\n"
    assert run_app("mode=eval", "resume=latest").stderr.startswith(said)
    done = run_app("resume=latest", LONGER)
    assert done.stderr.startswith(said) and (job / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    done = run_app("rerun=latest", "trainer.max_duration=1ba")
    assert done.stderr.startswith(said.replace("resume", "rerun"))
    (again,) = (one for one in folders(tmp_path) if (one / "checkpoints").exists())
    assert yaml.safe_load((again / "config.yaml").read_text())["seed"] == 1


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.pt", "state.pt"])
def test_a_malicious_checkpoint_is_refused_and_nothing_of_it_runs(name: str, tmp_path: Path, run_app: Any):
    """It is complete, as its sender made it: only what is in it is wrong."""
    run_app(*SHORT, *QUIET, "hydra.run.dir=run")
    checkpoint = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    commands = [("resume=run", LONGER)]
    if name == "model.pt":
        commands += [("mode=eval", "resume=run"), (*SHORT, *QUIET, "trainer.load_path=run", "hydra.run.dir=other")]
    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))):
        write({"weight": Evil()}, checkpoint / name)
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        for command in commands:
            refused = run_app(*command, exit_code=2)
            assert refused.stderr.count("error: ") == 1 and "which could run code: refused" in refused.stderr
            assert "Traceback" not in refused.stderr and "weights_only" not in refused.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "other").exists()
    (tmp_path / "there").mkdir()
    with contextlib.chdir(tmp_path / "there"):
        pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "there" / "ran").exists()  # as it would have been


def test_weights_that_do_not_fit_are_listed(tmp_path: Path, run_app: Any):
    run_app(*SHORT, *QUIET, "hydra.run.dir=run")
    deeper = (*SHORT, *QUIET, "trainer.load_path=run", "model.module.hidden=[128,128,10]")
    refused = run_app(*deeper, exit_code=2)
    assert "missing ['module.layers.6.bias', 'module.layers.6.weight'], unexpected []" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not folders(tmp_path)
    done = run_app(*deeper, "trainer.load_strict=false", "hydra.run.dir=loose")
    assert "loaded in part: missing ['module.layers.6.bias', 'module.layers.6.weight']" in done.stderr
