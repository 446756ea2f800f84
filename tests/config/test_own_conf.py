"""The `conf/` of the working directory, which is read without `--config-dir`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from main_runs import SHORT, run_folders

from runner.cli.catalogue import CONF
from runner.config.own_conf import find_own_conf

READ = "INFO: conf/ in this folder is read too"
EXPERIMENT = """# @package _global_
defaults:
  - /callbacks: [greeter]
  - override /model: own
  - override /vars: laptop
data:
  batch_size: ${vars.samples}
  eval_batch_size: 300
trainer:
  max_duration: 2ep
"""
FILES = {
    "model/own.yaml": "_target_: own.OwnModel\nunits: 8\n",
    "callbacks/greeter.yaml": "greeter:\n  _target_: own.Greeter\n  word: welcome\n",
    "vars/laptop.yaml": "samples: 400\n",
    "experiment/mine.yaml": EXPERIMENT,
}
MINE = ("experiment=mine", "~callbacks.mlflow_logger", "~callbacks.learning_curves", "~callbacks.progress_bar")


def write(folder: Path, files: dict[str, str]) -> None:
    """Write text files; `files` has their contents by path."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture
def project(folder: Path) -> Path:
    """A working directory whose `conf/` has a model, a callback, an experiment and variables."""
    write(folder / "conf", FILES)
    return folder


def recorded(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_a_project_trains_resumes_and_runs_again(project: Path, run_here: Any):
    made = run_here(*MINE, "trainer.max_duration=1ep", code=0)
    assert made.err == f"{READ}\n"
    assert "welcome OwnModel" in made.out
    (run,) = run_folders(project)
    config = recorded(run)
    assert config["vars"] == {"samples": 400} and config["data"]["batch_size"] == 400
    arguments = yaml.safe_load((run / "overrides.yaml").read_text())
    assert arguments[0] == f"--config-dir={project / 'conf'}"

    resumed = run_here("resume", "latest", "trainer.max_duration=2ep", code=0)
    assert "welcome OwnModel" in resumed.out
    again = run_here("rerun", "latest", "model.units=6", "hydra.run.dir=outputs/again", code=0)
    assert READ not in again.err and "--config-dir=conf of the run is used again" in again.err
    assert recorded(project / "outputs" / "again")["model"]["units"] == 6


@pytest.mark.slow
def test_check_and_a_sweep_read_conf_of_the_folder(project: Path, run_here: Any):
    assert "welcome" not in run_here("check", code=0).out
    checked = run_here("check", *MINE, code=0)
    assert "OwnModel" in checked.out
    swept = run_here("-m", *MINE, "trainer.max_duration=1ba", "model.units=3,4", code=0)
    assert "2 finished" in swept.out
    runs = run_folders(project, "outputs/sweeps/*/*/*units*")
    assert all("welcome OwnModel" in (run / "console.log").read_text() for run in runs)
    units = sorted(recorded(run)["model"]["units"] for run in runs)
    assert units == [3, 4]


def test_two_ranks_read_conf_of_the_folder(project: Path, run_app: Any):
    done = run_app(*MINE, "trainer.max_duration=1ba", "launch.nproc_per_node=2")
    assert done.stdout.count("welcome OwnModel") == 2 and done.stderr.count(READ) == 1


def test_a_misspelled_choice_is_corrected_from_conf_of_the_folder(project: Path, run_here: Any):
    stderr = run_here("model=onw", code=2).err
    assert "model=onw: no such choice; did you mean 'own'?" in stderr
    assert "did you mean +callbacks=greeter?" in run_here("greeter", code=2).err


BASE = "# @package _global_\ntrainer: {max_epochs: 3}\n"


@pytest.mark.parametrize(
    ("files", "typed", "message"),
    [
        (
            {"experiment/mine.yaml": BASE},
            ["experiment=mine"],
            "trainer.max_epochs: runner.Trainer has no such argument; write trainer.max_duration=3ep. It is set in "
            "conf/experiment/mine.yaml: correct it there",
        ),
        (
            {"experiment/mine.yaml": "defaults: [base]\n", "experiment/base.yaml": BASE},
            ["experiment=mine"],
            "It is set in conf/experiment/base.yaml: correct it there",
        ),
        (
            {"experiment/mine.yaml": "# @package _global_\nepochs: 3\n"},
            ["experiment=mine"],
            "epochs: no such key; write trainer.max_duration=3ep [conf/experiment/mine.yaml]",
        ),
        (
            {"optimizer/mine.yaml": "_target_: torch.optim.SGD\n_partial_: true\nlr: abc\n"},
            ["optimizer=mine"],
            "optimizer.lr='abc': torch.optim.SGD takes a number [conf/optimizer/mine.yaml]",
        ),
        (
            {"experiment/mine.yaml": "# @package _global_\ntrainer: {max_duration: 3 epochs}\n"},
            ["experiment=mine"],
            "Did you mean '3ep'? [conf/experiment/mine.yaml]",
        ),
        (
            {
                "experiment/mine.yaml": "defaults: [base]\n",
                "experiment/base.yaml": "# @package _global_\ndefaults: [override /model: mpl]\n",
            },
            ["experiment=mine"],
            "resnet8, segmentation, supervised, timm, torchvision [conf/experiment/base.yaml]",
        ),
    ],
    ids=str,
)
def test_a_mistake_in_a_file_names_the_file(
    project: Path, run_here: Any, files: dict[str, str], typed: list[str], message: str
):
    write(project / "conf", files)
    assert message in run_here(*typed, code=2).err


def test_a_mistake_in_the_command_names_no_file(project: Path, run_here: Any):
    write(project / "conf", {"model/mine.yaml": "_target_: own.OwnModel\nunits: 3\n"})
    assert "mine.yaml" not in run_here("model=mine", "model.units=x", code=2).err
    assert "mine.yaml" not in run_here("model=supervised", "+model.metrics.f1=F1Score", code=2).err


def test_a_typed_config_dir_replaces_conf_of_the_folder(project: Path, run_here: Any):
    write(project / "other", {"model/other.yaml": "_target_: own.OwnModel\n"})
    made = run_here("check", "--config-dir=other", "model=other", code=0)
    assert READ not in made.err
    assert "model=own: no such choice" in run_here("--config-dir=other", "model=own", code=2).err


def test_a_rerun_reads_the_conf_of_the_saved_run(project: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch):
    run_here(*MINE, "trainer.max_duration=1ba", code=0)
    (run,) = run_folders(project)
    elsewhere = project / "elsewhere"
    write(elsewhere, {"conf/model/other.yaml": "_target_: own.OwnModel\n"})
    monkeypatch.chdir(elsewhere)
    again = run_here("rerun", str(run), "hydra.run.dir=again", code=0)
    assert READ not in again.err and "of the run is used again" in again.err and "welcome" in again.out


def test_files_of_conf_with_names_of_the_runner_are_reported_and_not_read(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "conf", {"config.yaml": "seed: 99\n"})
    assert find_own_conf([], CONF) == [] and capfd.readouterr().err == ""
    write(tmp_path / "conf", {"model/mlp.yaml": "_target_: theirs.MLP\n", "model/net.yaml": "_target_: theirs.Net\n"})
    assert find_own_conf(["model=mlp"], CONF) == [f"--config-dir={tmp_path / 'conf'}"]
    stderr = capfd.readouterr().err
    assert stderr.startswith(f"{READ}, except for files whose names the runner uses: config.yaml, model/mlp.yaml")
    assert stderr.count("\n") == 1 and "conf/experiment/<name>.yaml" in stderr


def test_conf_of_the_runner_is_not_read_twice(capfd: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CONF.parent)
    assert find_own_conf([], CONF) == [] and capfd.readouterr().err == ""


CONFIGURING_HYDRA = [
    {"experiment/evil.yaml": "# @package _global_\nhydra: {callbacks: {mine: {_target_: own.Evil}}}\n"},
    pytest.param(
        {"experiment/evil.yaml": '# @package _global_\n"\\x68ydra": {job_logging: {handlers: {a: {(): own.evil}}}}\n'},
        marks=pytest.mark.slow,
    ),
    {"model/evil.yaml": "# @package hydra.callbacks\nmine: {_target_: own.Evil}\n"},
    pytest.param({"model/evil.yaml": "defaults: [/vars@_global_.hydra.callbacks: evil]\n"}, marks=pytest.mark.slow),
    {"model/evil.yaml": 'defaults: ["/vars@_global_.h\\x79dra.callbacks": evil]\n'},
    {"hydra/callbacks/evil.yaml": "mine: {_target_: own.Evil}\n"},
    pytest.param({"model/hydra/evil.yaml": "callbacks: {mine: {_target_: own.Evil}}\n"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("files", CONFIGURING_HYDRA, ids=str)
def test_a_conf_that_configures_hydra_is_not_read_and_runs_no_code(project: Path, run_here: Any, files: dict[str, str]):
    (project / "own.py").write_text("class Evil:\n    def __init__(self): open('executed', 'w')\n\nevil = Evil\n")
    write(project / "conf", files)
    (file,) = files
    run_here("--help", code=0)
    for command in (["experiment=evil", "--cfg", "job"], ["explain", "model=evil"]):
        stderr = run_here(*command).err
        assert f"WARNING: conf/ is not read: conf/{file} configures Hydra itself" in stderr
        assert "--config-dir conf allows it" in stderr
    assert not (project / "executed").exists()


@pytest.mark.slow
def test_a_conf_with_sweep_settings_is_read(project: Path, run_here: Any):
    write(project / "conf", {"sweep/mine.yaml": "# @package _global_\nhydra: {sweeper: {params: {seed: '1,2'}}}\n"})
    ended = run_here("-m", "sweep=mine", *SHORT, "trainer.max_duration=1ba", "callbacks=none", code=0)
    assert ended.err.startswith(f"{READ}\n") and "seed" in ended.out


def test_variables_of_the_user_are_keys_of_vars(tmp_path: Path, run_here: Any):
    run_here("check", "+vars.paths.size=32", "data.batch_size=${vars.paths.size}", code=0)
    for wrong in ("vars=laptop", "vars=null"):
        stderr = run_here(wrong, code=2).err
        assert stderr.startswith(f"error: vars={'None' if 'null' in wrong else repr('laptop')}: ")
        assert "+vars.<name>=" in stderr and "conf/vars/<name>.yaml" in stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf# @package _global_\nseed: 3\n", "begins with a byte-order mark; save it as UTF-8 without one"),
        ("# @package _global_\nseed: 3\n".encode("utf-16"), "is not UTF-8"),
        ("# @package _global_\nrun_name: café\n".encode("latin-1"), "is not UTF-8"),
    ],
    ids=["byte-order mark", "UTF-16", "Latin-1"],
)
def test_a_file_in_another_encoding_is_named(folder: Path, run_here: Any, content: bytes, message: str):
    write(folder, {"conf/experiment/mine.yaml": ""})
    (folder / "conf" / "experiment" / "mine.yaml").write_bytes(content)
    done = run_here("explain", "experiment=mine", code=2)
    assert f"error: conf/experiment/mine.yaml: {message}" in done.err
    run_here("explain", "experiment=digits_plain", code=0)  # does not read that file
