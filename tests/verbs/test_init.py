"""`runner init my_project`: the commands and tests of the new project run, and nothing is overwritten."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from main_runs import run_folders
from python_process import run_python

from runner.verbs.init import TEMPLATE


def files(folder: Path) -> list[str]:
    """Return the files of a project, without bytecode."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if "__pycache__" not in path.parts)


def commands(project: Path) -> list[list[str]]:
    """Return the commands in the README of a project, each as the arguments of Python."""
    (block,) = re.findall(r"```bash\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert all(line[0] == "python" for line in lines)
    return [line[1:] for line in lines]


@pytest.fixture
def project(tmp_path: Path, run_here: Any) -> Path:
    """A project that `runner init` wrote."""
    finished = run_here("init", "my project", code=0)
    assert "my project/README.md" in finished.out
    assert finished.err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["my project"]
    return tmp_path / "my project"


@pytest.mark.slow
def test_the_commands_in_the_readme_run(project: Path, run_app: Any):
    assert files(project) == files(TEMPLATE)
    assert (project / "README.md").read_text().startswith("# my project\n") and "$name" not in str(project)
    check, train, resume, change, sweep, test = commands(project)
    checked = run_app(*check[2:], folder=project)
    assert "TwoLayers" in checked.stdout and "INFO: conf/ in this folder is read too\n" in checked.stderr
    assert not run_folders(project)
    run_app(*train[2:], folder=project)
    (run,) = run_folders(project)
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"ep20-ba200"}
    run_app(*resume[2:], folder=project)
    assert run_folders(project) == [run] and (run / "checkpoints" / "ep25-ba250").exists()
    run_app(*change[2:], "trainer.max_duration=1ep", folder=project)
    swept = run_app(*sweep[2:], "trainer.max_duration=1ep", folder=project)
    assert "2 finished" in swept.stdout
    assert test == ["-m", "pytest"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "pytest"], ["-c", "import pytest, sys; sys.exit(pytest.main())"]], ids=str)
def test_the_tests_of_the_project_pass(project: Path, command: list[str]):
    output = run_python([*command], cwd=project, real=True).stdout
    assert "2 passed" in output, output


def test_init_does_not_import_torch(tmp_path: Path):
    program = "import sys; from runner.__main__ import main; code = main(); print('torch' in sys.modules); exit(code)"
    command = [sys.executable, "-c", program, "init", "mine"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False" and files(tmp_path / "mine") == files(TEMPLATE)


def test_nothing_is_overwritten(tmp_path: Path, run_here: Any):
    (tmp_path / "mine").mkdir()
    run_here("init", "mine", code=0)  # an empty folder is allowed
    (tmp_path / "mine" / "models.py").write_text("mine")
    (tmp_path / "file").touch()
    for name in ("mine", "file", "."):
        error = run_here("init", name, code=2).err
        assert error == f"error: FOLDER={name!r}: exists already, and nothing is overwritten; give a new folder\n"
    assert (tmp_path / "mine" / "models.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["init"], "init: needs FOLDER; write runner init FOLDER, such as runner init my_project"),
        (["init", "a", "b"], "init: takes FOLDER, not a b; write runner init FOLDER"),
        (["init", "a", "seed=1"], "init: takes FOLDER, not a seed=1; write runner init FOLDER"),
        (["init", "a", "--name", "b"], "--name: init has no such option; allowed: none"),
        (["-m", "init", "a"], "-m: init composes no config and takes no such option"),
        (["init", "file/a"], "cannot use '"),
    ],
    ids=str,
)
def test_a_wrong_init_command_gives_one_error(tmp_path: Path, run_here: Any, typed: list[str], message: str):
    (tmp_path / "file").touch()
    err = run_here(*typed, code=2).err
    assert f"error: {message}" in err and err.count("error: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_sweep_in_other_processes_finds_the_conf_of_the_project(project: Path, run_app: Any, launcher: str):
    jobs = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    sweep = ["-m", "experiment=two_moons", "seed=0,1", "trainer.max_duration=2ep", f"hydra/launcher={launcher}", *jobs]
    run_app(*sweep, "callbacks=[checkpoint_saver]", folder=project)
    runs = run_folders(project, "outputs/sweeps/*/*/seed*")
    assert [run.name for run in runs] == ["seed0-two_layers-two_moons", "seed1-two_layers-two_moons"]
    for run in runs:
        assert yaml.safe_load((run / "overrides.yaml").read_text())[0] == f"--config-dir={project / 'conf'}"
        assert "models.TwoLayers" in (run / "config.yaml").read_text()
    before = [(run / "result.json").read_bytes() for run in runs]
    assert "2 finished" in run_app(*sweep, "callbacks=[checkpoint_saver]", folder=project).stdout
    assert [(run / "result.json").read_bytes() for run in runs] == before
