"""Runs made with `--config-dir` are resumed and rerun without typing it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_runs import LONGER, QUIET, SHORT, folders, weights

MADE = ("experiment=mine", *SHORT[2:], *QUIET)
EXPERIMENT = """
# @package _global_
defaults:
  - override /model: mine
optimizer:
  lr: 0.07
trainer:
  max_duration: 2ep
"""
USED = "INFO: --config-dir={} of the run is used again\n"
GONE = "INFO: --config-dir={} of the run does not exist; the recorded config is used\n"
STRETCHED = "INFO: trainer.max_duration: 2ep -> 3ep; settings in fractions of it stretch: scheduler.t_max=1dur, "
STRETCHED += "scheduler.t_warmup=0.15dur\n"


def arguments_of(run: Path) -> list[str]:
    """Return the recorded arguments of a run."""
    return yaml.safe_load((run / "overrides.yaml").read_text())


def name_of(run: Path) -> str:
    """Return the recorded name of a run."""
    return json.loads((run / "environment.json").read_text())["run_name"]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A config folder with an experiment and a model, whose name needs quotes in a shell."""
    folder = tmp_path / "Ann's conf"
    (folder / "experiment").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    shipped = (Path(__file__).resolve().parents[2] / "conf" / "model" / "mlp.yaml").read_text()
    assert "[128, 128]" in shipped
    (folder / "model" / "mine.yaml").write_text(shipped.replace("[128, 128]", "[8]"))
    return folder


@pytest.fixture
def run(tmp_path: Path, conf: Path, run_here: Callable[..., Any]) -> Path:
    """Train a run with these configs, typed as a relative path, and return its folder."""
    done = run_here(*MADE, "--config-dir", conf.name, "hydra.run.dir=outputs/2000-01-01/10-00-00", code=0)
    assert done.err == ""
    return tmp_path / "outputs" / "2000-01-01" / "10-00-00"


@pytest.mark.slow
def test_every_verb_uses_the_recorded_config_dir_from_any_folder(
    run: Path, conf: Path, run_here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert arguments_of(run) == [f"--config-dir={conf}", *MADE]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    used = USED.format(conf)
    assert run_here("resume", str(run), LONGER, code=0).err == used + STRETCHED
    assert arguments_of(run) == [f"--config-dir={conf}", *MADE, LONGER]
    assert name_of(run) == "10-00-00-mine-digits-2000-01-01"
    done = run_here("rerun", str(run), "trainer.max_duration=2ep", "optimizer.lr=0.2", code=0)
    assert done.err == used + "INFO: optimizer.lr: 0.07 -> 0.2\nINFO: trainer.max_duration: 3ep -> 2ep\n"
    (again,) = folders(tmp_path / "elsewhere")
    assert "-mine-digits-2" in name_of(again) and f"--config-dir={conf}" in arguments_of(again)
    config = yaml.safe_load((again / "config.yaml").read_text())
    assert config["model"]["module"]["hidden"] == [8] and config["optimizer"]["lr"] == 0.2
    assert run_here("eval", f"{run}/checkpoints/ep2-ba6", code=0).err == used
    typed = ("trainer.max_duration=4ep", "optimizer.lr=0.2", "--allow-changes=optimizer")
    changed = "INFO: optimizer.lr: 0.07 -> 0.2 (--allow-changes)\n" + STRETCHED.replace("2ep -> 3ep", "3ep -> 4ep")
    assert run_here("check", str(run), *typed, code=0).err == used + changed


LINES = """
lines:
  _target_: runner.callbacks.JSONLinesLogger
  filename: ${hydra:job.name}-${hydra:runtime.choices.model}.jsonl
"""


@pytest.mark.slow
def test_hydra_interpolations_keep_their_recorded_values(conf: Path, run_app: Callable[..., Any], tmp_path: Path):
    (conf / "callbacks").mkdir()
    (conf / "callbacks" / "lines.yaml").write_text(LINES)
    run = tmp_path / "run"
    made = [argument for argument in MADE if "callbacks" not in argument]
    run_app(*made, "--config-dir", conf.name, "callbacks=[checkpoint_saver,lines]", f"hydra.run.dir={run}")
    (file,) = run.glob("*-mine.jsonl")
    for again in (["eval", str(run)], ["check", str(run), LONGER], ["resume", str(run), LONGER]):
        run_app(*again)
    assert {json.loads(line).get("epoch") for line in file.read_text().splitlines()} >= {0, 1, 2}


@pytest.mark.slow
def test_without_the_config_dir_the_recorded_config_is_used_and_kept(
    run: Path, conf: Path, run_here: Callable[..., Any], tmp_path: Path
):
    before = weights(run)
    aside = conf.rename(tmp_path / "aside")
    gone = GONE.format(conf.name)
    assert run_here("rerun", str(run), code=0).err == gone
    (again,) = folders(tmp_path) - {run}
    assert weights(again) == before and arguments_of(again) == [f"--config-dir={conf}", *MADE]
    assert "-mine-digits-2" in name_of(again) and "2000-01" not in name_of(again)
    assert name_of(again).startswith(again.name)
    assert run_here("resume", str(run), LONGER, code=0).err == gone + STRETCHED
    assert arguments_of(run) == [f"--config-dir={conf}", *MADE, LONGER]
    assert name_of(run) == "10-00-00-mine-digits-2000-01-01"
    run_here("rerun", str(run), "experiment=digits_plain", "hydra.run.dir=other", code=0)
    assert "experiment=mine" not in arguments_of(tmp_path / "other"), "the recorded experiment was replaced"

    aside.rename(conf)
    longer = run_here("resume", str(run), "trainer.max_duration=4ep", code=0)
    assert longer.err == USED.format(conf.name) + STRETCHED.replace("2ep -> 3ep", "3ep -> 4ep")


@pytest.mark.slow
def test_keys_of_a_missing_config_dir_can_be_changed(
    run: Path, conf: Path, run_here: Callable[..., Any], tmp_path: Path
):
    conf.rename(tmp_path / "aside")
    typed = ("rerun", str(run), "model.module.hidden=[4]")  # the default model has no such key
    done = run_here(*typed, "hydra.run.dir=again", code=0)
    assert done.err == GONE.format(conf.name) + "INFO: model.module.hidden: [8] -> [4]\n"
    config = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert config["model"]["module"]["hidden"] == [4] and config["model"]["module"]["_target_"].endswith("MLP")
    assert "no key 'hiden'" in run_here("rerun", str(run), "model.module.hiden=[4]", code=2).err


def test_a_typed_config_dir_replaces_the_recorded_one(run: Path, run_here: Callable[..., Any], tmp_path: Path):
    (tmp_path / "other" / "experiment").mkdir(parents=True)
    other = EXPERIMENT.replace("0.07", "0.3").replace("/model: mine", "/model: mlp")
    (tmp_path / "other" / "experiment" / "mine.yaml").write_text(other)
    done = run_here("rerun", str(run), "--config-dir=other", "hydra.run.dir=again", code=0)
    assert done.err == (
        "INFO: conf/ or the --config-dir has changed since the run was recorded; the recorded config is used: "
        "model.module.hidden: [8] -> [128, 128]; optimizer.lr: 0.07 -> 0.3\n"
    )
    assert arguments_of(tmp_path / "again") == [f"--config-dir={tmp_path / 'other'}", *MADE]
    assert weights(tmp_path / "again") == weights(run)
    missing = run_here("rerun", str(run), "--config-dir=missing", code=2)
    assert missing.err == f"error: --config-dir={str(tmp_path / 'missing')!r}: no such folder\n"


@pytest.mark.slow
def test_jobs_of_a_sweep_record_the_config_dir(conf: Path, run_here: Callable[..., Any], tmp_path: Path):
    run_here("-m", *MADE, "seed=0,1", f"--config-dir={conf.name}", "hydra.sweep.dir=sweep", code=0)
    job = tmp_path / "sweep" / "seed1-mine-digits"
    assert arguments_of(job) == [f"--config-dir={conf}", *MADE, "seed=1"]
    assert run_here("resume", str(job), LONGER, code=0).err == USED.format(conf.name) + STRETCHED


# A foreign config for which Hydra itself would import a module, before any target is checked.
EVIL = "# @package _global_\nhydra:\n  callbacks:\n    evil:\n      _target_: own.Evil\n"


def test_the_config_dir_of_a_foreign_run_is_not_read(
    run: Path, conf: Path, run_here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\nfrom hydra.experimental.callback import Callback as Evil\nPath('imported').touch()\n"
    )
    (conf / "experiment" / "mine.yaml").write_text(EVIL)
    own = (run / "signature").read_text()
    (run / "signature").write_text("of another user")
    done = run_here("rerun", str(run), "hydra.run.dir=again", code=0)
    assert done.err == (
        f"INFO: config.yaml or overrides.yaml of {run} was changed, or written by someone else\n"
        "INFO: --config-dir=Ann's conf of the run is not read: the run was made by someone else, or "
        "on another machine; type the option if you trust that directory\n"
    )
    assert arguments_of(tmp_path / "again") == [*MADE[1:]], (
        "the signed record must not name the folder that was not read"
    )
    assert run_here("rerun", "again", code=0).err.count("is used again") == 0
    assert not (tmp_path / "imported").exists()

    (run / "signature").write_text(own)
    run_here("rerun", str(run), "hydra.run.dir=trusted")
    assert (tmp_path / "imported").exists()  # as without the check
