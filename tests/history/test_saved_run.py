"""Saved runs are found by folder, checkpoint, MLflow id or `latest`."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_runs import LONGER, QUIET, ROOT, SHORT, folders, weights, write_manifest
from stores import change, query

from runner.cli.command import Command, parse
from runner.history.saved_run import find_saved_run, with_latest


def test_a_record_holds_the_arguments_verb_and_command(tmp_path: Path, run_here: Any):
    run_here(*SHORT, *QUIET, "--allow-divergence", "hydra.run.dir=run", code=0)
    run_here("rerun", "run", "seed=3", "--allow-divergence", "hydra.run.dir=again", code=0)
    for folder, verb, typed in (("run", "train", [*SHORT, *QUIET]), ("again", "rerun", [*SHORT, *QUIET, "seed=3"])):
        assert yaml.safe_load((tmp_path / folder / "overrides.yaml").read_text()) == typed
        environment = json.loads((tmp_path / folder / "environment.json").read_text())
        assert environment["verb"] == verb and " --allow-divergence " in environment["command"]
        saved = find_saved_run(Command.of("rerun", str(tmp_path / folder)))
        assert saved is not None and saved.overrides == typed


def test_without_a_record_no_saved_run_is_found(tmp_path: Path):
    (tmp_path / "checkpoints" / "ep1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "ep1" / "manifest.json").write_text('{"files": {}}')  # made in Python, without a config
    for arguments in (["seed=1"], ["eval"], ["check"], ["resume", str(tmp_path)], ["resume", "missing", "seed=1"]):
        assert find_saved_run(parse(arguments)) is None


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["rerun", "missing"], "RUN='missing': no such folder"),
        (["rerun", "."], "RUN='.': no record"),
        (["rerun", "a,b"], "one run at a time"),
        (["rerun", "0" * 32, "~callbacks.mlflow_logger"], "neither a folder, nor a run"),
        (["resume", "abcdef01" * 4], "neither a folder, nor a run"),
        (["rerun", "0" * 32, "callbacks.mlflow_logger.tracking_uri=http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_a_run_that_cannot_be_found_is_one_error(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        find_saved_run(parse(arguments))
    assert part in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_is_found_by_its_mlflow_id(tmp_path: Path, run_app: Any):
    (tmp_path / "own" / "scheduler").mkdir(parents=True)
    shutil.copy(ROOT / "conf" / "scheduler" / "cosine_annealing.yaml", tmp_path / "own" / "scheduler" / "mine.yaml")
    composed = ("scheduler=mine", "--config-dir=own")
    used = "INFO: --config-dir=own of the run is used again\n"
    run_app(*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]", "run_name=mine", *composed)
    (first,) = folders(tmp_path)
    run_id = json.loads((first / "mlflow" / "sent.json").read_text())["run_id"]

    assert run_app("resume", run_id, LONGER).stderr.startswith(used)
    assert folders(tmp_path) == {first}
    assert (first / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    evaluated = run_app("eval", run_id)
    assert "ep3-ba9, after 9 batches" in evaluated.stdout
    (evaluation,) = folders(tmp_path) - {first}
    refused = run_app("resume", str(evaluation), exit_code=2)
    assert "made by runner eval" in refused.stderr and str(first / "checkpoints" / "ep3-ba9") in refused.stderr

    store = tmp_path / "outputs" / "mlflow.db"
    tags = dict(query(store, f"select key, value from tags where run_uuid = '{run_id}'"))
    assert tags["runner.run_dir"] == str(first)
    assert query(store, "select name, status from runs order by start_time") == [
        ("mine", "FINISHED"),
        ("eval-mine", "FINISHED"),
    ]
    assert (run_id,) in query(store, "select value from tags where key = 'runner.evaluates'")
    assert not query(store, "select key from params where key like '%run_dir%'")

    (record,) = tmp_path.glob(f"outputs/mlartifacts/{run_id}/artifacts/record")
    configs = [yaml.safe_load((record / session / "config.yaml").read_text()) for session in (".", "sessions/1")]
    assert [config["trainer"]["max_duration"] for config in configs] == ["3ep", "2ep"]

    # Without its folder, the run is rerun from the record in MLflow.
    first.rename(tmp_path / "elsewhere")
    refused = run_app("resume", run_id, exit_code=2)
    assert (
        str(first) in refused.stderr
        and f"runner rerun {run_id}" in refused.stderr
        and len(refused.stderr.splitlines()) == 1
    )
    assert run_app("rerun", run_id, "trainer.max_duration=2ep", *QUIET).stderr.startswith(used)
    (again,) = folders(tmp_path) - {first, evaluation}
    assert weights(again) == weights(tmp_path / "elsewhere")

    change(store, f"update runs set lifecycle_stage = 'deleted' where run_uuid = '{run_id}'")
    for verb in ("resume", "rerun"):
        refused = run_app(verb, run_id, exit_code=2)
        assert "is deleted" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert folders(tmp_path) == {evaluation, again}


def test_latest_is_the_run_that_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="RUN='latest': no run in outputs/ has written a checkpoint"):
        with_latest(Command.of("resume", "latest"))
    for age, folder in enumerate(("2026-01-01/10-00-00", "sweeps/2026-01-02/10-00-00/lr0.1", "of the Python API")):
        write_manifest(tmp_path / "outputs" / folder, "ep1-ba3", 1000 - age)
    command = with_latest(parse(["-m", "fork", "latest", "5", "seed=1"]))
    assert command.words == ("outputs/2026-01-01/10-00-00", "5") and command.overrides == ("seed=1", "-m")
    assert capsys.readouterr().err == "INFO: latest: outputs/2026-01-01/10-00-00\n"
    assert with_latest(Command.of("rerun", "latest")).words == ("outputs/2026-01-01/10-00-00",)
    for typed in (
        "resume ./latest",
        "resume outputs/latest",
        "run_name=latest",
        "eval latest/x",
        "eval",
        "list latest",
    ):
        command = parse(typed.split())
        assert with_latest(command) == command


@pytest.mark.slow
def test_every_verb_takes_latest_for_a_run(tmp_path: Path, run_app: Any):
    run_app("-m", *SHORT, *QUIET, "seed=0,1")
    (job,) = tmp_path.glob("outputs/sweeps/*/*/seed1-mlp-digits")
    notice = f"INFO: latest: {job.relative_to(tmp_path)} (a job of a sweep: there is no other run)\n"
    assert run_app("eval", "latest").stderr.startswith(notice)
    done = run_app("resume", "latest", LONGER)
    assert done.stderr.startswith(notice) and (job / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    done = run_app("rerun", "latest", "trainer.max_duration=1ba")
    assert done.stderr.startswith(notice)
    (again,) = (folder for folder in folders(tmp_path) if (folder / "checkpoints").exists())
    assert yaml.safe_load((again / "config.yaml").read_text())["seed"] == 1


def test_a_folder_with_other_files_is_refused_as_a_run(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "of another program"}')
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="holds no run, neither a record") as raised:
        find_saved_run(Command.of("resume", str(tmp_path)))
    assert "pipe" not in str(raised.value) and "remove" not in str(raised.value)
    (tmp_path / "other" / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(ValueError, match="pipe: is neither a file nor a folder"):
        find_saved_run(Command.of("resume", str(tmp_path)))


@pytest.mark.parametrize("verb", ["resume", "eval", "rerun"])
@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/ep1"])
def test_a_run_of_a_command_that_lost_its_config_is_refused(tmp_path: Path, verb: str, name: str):
    (tmp_path / "checkpoints" / "ep1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "ep1" / "manifest.json").write_text('{"files": {}}')
    (tmp_path / "overrides.yaml").write_text("[]")
    with pytest.raises(ValueError, match=r"has overrides\.yaml, but no config\.yaml, so its experiment is unknown"):
        find_saved_run(Command.of(verb, str(tmp_path / name)))


@pytest.mark.parametrize(
    ("pattern", "replacement", "change"),
    [(r"lr: 0\.1\b", "lr: 0.5", "optimizer.lr: 0.1 -> 0.5"), (r"(?s)\nalgorithms:.*", "\n", "algorithms: {batch_")],
    ids=["edited", "cut off"],
)
def test_a_record_that_was_changed_is_compared_with_the_checkpoint(
    tmp_path: Path, run_here: Any, pattern: str, replacement: str, change: str
):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", code=0)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub(pattern, replacement, config.read_text()))
    error = run_here("resume", "run", LONGER, code=2).err
    assert "config.yaml or overrides.yaml of run was changed, or written by someone else" in error
    assert f"the run was trained with a different config so far:\n  {change}" in error
    forked = run_here("fork", "run", "ba3", LONGER, "hydra.run.dir=fork", code=0).err
    assert f"INFO: {change}" in forked


def test_typed_keys_that_only_training_uses_are_named(tmp_path: Path, run_here: Any):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", code=0)
    useless = ("optimizer=sgd", "optimizer.lr=0.2", "trainer.max_duration=3ep")
    error = run_here("eval", "run", *useless, "data.eval_batch_size=100", code=0).err
    assert "optimizer, optimizer.lr, trainer.max_duration: changes nothing, because eval does not train\n" in error
    assert "data.eval_batch_size" not in error
    assert "changes nothing" not in run_here("eval", "run", code=0).err  # the keys of the run itself are no mistake


def test_a_lost_overrides_file_is_named_and_the_config_is_used(tmp_path: Path, run_here: Any):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", code=0)
    (tmp_path / "run/overrides.yaml").unlink()
    error = run_here("rerun", "run", *QUIET, "hydra.run.dir=again", code=0).err
    assert (
        "INFO: run has no overrides.yaml; the recorded config is used\n" in error and "conf/ has changed" not in error
    )
    first, again = (yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("run", "again"))
    assert first == again


def test_weights_are_named_once(tmp_path: Path, run_here: Any):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", code=0)
    for verb in ("eval", "predict"):
        error = run_here(verb, "run", "trainer.load_path=run", code=2).err
        assert "error: trainer.load_path='run': RUN already gives the weights; leave one of the two out\n" in error
