"""The published wheel and sdist: their files, and runs of an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from python_process import run_python
from stores import query

from runner import __version__

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("callbacks", "algorithms", "conf")
OWN = """
from runner import Callback


class Mine(Callback):
    def fit_start(self, state, logger):
        import runner

        print("mine at", runner.__file__)
"""
SHORT = ("trainer.max_duration=1ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and the wheel as they are published, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the installed wheel first."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return {**os.environ, "PYTHONPATH": str(site)}


def files_of(folder: str) -> set[str]:
    """Return the files below a folder of the project, links followed, without caches."""
    walked = os.walk(ROOT / folder, followlinks=True)
    return {
        (Path(parent) / name).relative_to(ROOT).as_posix()
        for parent, _, names in walked
        for name in names
        if "__pycache__" not in parent
    }


@pytest.mark.slow
def test_a_wheel_has_exactly_the_files_of_runner(wheel: Path):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_of("runner")
    assert {"runner/py.typed", "runner/callbacks/__init__.pyi", "runner/conf/algorithms/ema.yaml"} <= names


@pytest.mark.slow
def test_an_sdist_has_the_project_without_files_of_a_checkout(dist: Path):
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = archive.getmembers()
    assert not any(member.issym() or member.islnk() for member in members), "Windows cannot unpack links"
    names = {member.name.partition("/")[2] for member in members}
    for folder in ("runner", *ROOMS, "tests", "docs", "benchmarks"):
        assert files_of(folder) <= names
    only_here = {".editable", ".git", ".pre-commit-config.yaml", "outputs", "build", "dist"}
    top = {path.name for path in ROOT.iterdir() if not path.name.startswith((".venv", ".pytest", ".ruff"))}
    assert top - {name.partition("/")[0] for name in names} <= only_here


@pytest.mark.slow
def test_a_wheel_runs_beside_folders_of_the_same_names(installed: dict[str, str], tmp_path: Path):
    for name in (*ROOMS, "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "callbacks" / "mine.py").write_text(OWN)
    own = "+callbacks.mine._target_=callbacks.mine.Mine"
    done = run_python(
        ["-m", "runner", *SHORT, own, "+algorithms=ema"], cwd=tmp_path, env=installed, real=True, check=True
    )
    assert f"mine at {installed['PYTHONPATH']}/runner/__init__.py" in done.stdout
    run_python(["-m", "runner", "-m", *SHORT, own, "seed=0,1"], cwd=tmp_path, env=installed, real=True, check=True)
    statuses = query(tmp_path / "outputs" / "mlflow.db", "select status from runs where name not like '%sweep%'")
    assert {*statuses} == {("FINISHED",)} and len(statuses) >= 3


@pytest.mark.slow
def test_a_wheel_shows_help_makes_a_project_and_trains_it(installed: dict[str, str], tmp_path: Path):
    def run(*words: str, cwd: Path = tmp_path) -> str:
        return run_python(["-m", "runner", *words], cwd=cwd, env=installed, real=True, check=True).stdout

    assert run("--help").startswith(f"runner {__version__}: an experiment runner for PyTorch\n")
    assert "a project that runs" in run("init", "mine")
    assert "\ntrained " in run("experiment=two_moons", "trainer.max_duration=1ep", cwd=tmp_path / "mine")


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
