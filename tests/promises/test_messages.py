"""A wrong command prints one message that says what to write instead, and exits with code 2 before anything is trained.

It leaves no files. People who type the options of other libraries are told the option of this one.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from main_runs import query, run_folders
from newcomers import AS_PROCESSES, FILES, MISTAKES, ONE_OF_EACH_SECTION
from python_process import run_python
from tiers import fast
from wrong_commands import ONE_OF_EACH_KIND, assert_nothing_left, assert_one_message, plant_modules

from runner.cli.catalogue import CONF
from runner.cli.command import parse
from runner.cli.command_line import check_options, merge_repeated, search_path
from runner.config import build
from runner.config.composed import to_plain
from runner.config.composing import initialized
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.failures.errors import WrongConfig
from runner.records.folder import register_resolver
from runner.sweeps.sweep import register_resolver as register_resolver_of_sweeps


@pytest.mark.parametrize("command", ONE_OF_EACH_KIND)
def test_a_wrong_command_prints_one_message_and_leaves_no_files(command: str, run_here: Any, folder: Path):
    """The other wrong commands are tested with --json, in test_programs.py."""
    plant_modules(folder)
    before = sorted(folder.rglob("*"))
    code, out, err = run_here(*command.split())
    assert code == 2, err
    assert not out or (out.startswith("sweep-") and len(out.splitlines()) == 1)  # a sweep prints its name first
    assert_one_message(command, err)
    assert_nothing_left(folder, before)
    assert query(folder, "select count(*) from runs") == [(0,)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("data=digit",),
        ("optimizer.lrr=1",),
        ("callbacks=null",),
        ("--lr", "0.1"),
        ("resume", "missing", "seed=x"),
        ("-m", "model=mlp,mpl"),
        ("trainer.max_duration=5epochs", "callbacks=none"),
    ],
    ids=" ".join,
)
def test_a_process_with_a_wrong_command_exits_with_2(run_app: Any, tmp_path: Path, arguments: tuple[str, ...]):
    finished = run_app(*arguments, exit_code=2)
    assert finished.stdout.count("\n") <= 1  # the name of the run
    assert finished.stderr.count("error: ") == 1 and len(finished.stderr.splitlines()) <= 2, finished.stderr
    assert run_folders(tmp_path) == run_folders(tmp_path, "outputs/**/[0-9]*") == []
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_hydra_full_error_prints_the_trace_of_a_wrong_config(folder: Path, run_here: Any, monkeypatch: Any):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    code, _, err = run_here("+callbacks.mine._target_=own.Broken")
    assert code == 2
    assert "None + 1" in err and err.splitlines()[-1].startswith("error: callbacks.mine")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


@pytest.mark.parametrize("argument", ["optimizer.lrr=1", "data.batch_size=0"])
def test_a_wrong_command_on_ranks_ends_all_of_them_with_one_message(tmp_path: Path, argument: str):
    """The first mistake is detected by rank 0 when it composes the config, the second by all ranks when they build."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    finished = run_python([*launch, argument, "~callbacks.mlflow_logger"], cwd=tmp_path, timeout=120.0)
    assert finished.returncode != 0
    messages = [line for line in finished.stderr.splitlines() if line.startswith("error")]
    assert len(messages) == 1 and messages[0].startswith(f"error: {argument.partition('=')[0]}"), finished.stderr
    # torchrun adds its own report, which ends with the exit code of each rank.
    assert "exitcode  : 2" in finished.stderr
    assert "WrongConfig" not in finished.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("command", fast(MISTAKES, *ONE_OF_EACH_SECTION))
def test_a_mistake_raises_one_message_that_says_what_to_write(
    command: str, project: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", ["runner", *arguments, f"--config-dir={project / 'conf'}"])
    monkeypatch.delitem(sys.modules, "newcomer", raising=False)
    before = files(project)
    with pytest.raises(WrongConfig) as raised:
        check(arguments, project)
    message = str(raised.value)
    assert "\n" not in message
    for part in MISTAKES[command]:
        assert part in message, message
    assert files(project) == before


@pytest.mark.parametrize("command", AS_PROCESSES)
def test_a_process_with_a_mistake_exits_with_2(command: str, project: Path, run_app: Any):
    before = files(project)
    finished = run_app(*shlex.split(command), exit_code=2)
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and finished.stdout.count("\n") <= 1 and "Traceback" not in finished.stderr, finished.stderr
    for part in MISTAKES[command]:
        assert part in errors[0]
    assert files(project) == before


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that some of the mistakes refer to."""
    register_resolver()
    register_resolver_of_sweeps()
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def check(arguments: list[str], folder: Path) -> None:
    """Check a command in this process as before training, but without reading data."""
    try:
        command = parse(arguments)
    except ValueError as error:
        raise WrongConfig(str(error)) from error
    with config_errors(), initialized(CONF):
        check_options(command.overrides)
        overrides = [override for override in merge_repeated(command.overrides) if not override.startswith("-")]
        config = to_plain(compose("config", [*overrides, *search_path([f"--config-dir={folder / 'conf'}"])]))
        build.check(Experiment(config))
        if config["model"]["_target_"].startswith("newcomer"):
            build.make_model(Experiment(config))
