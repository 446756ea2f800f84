"""What an installation has: one name at the top level, and all that a run needs, wherever it is started."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from python_process import run_python
from stores import query

ROOT = Path(__file__).resolve().parents[2]
OWN = """
from runner import Callback


class Mine(Callback):
    def fit_start(self, state, logger):
        import runner

        print("mine at", runner.__file__)
"""
SHORT = ("trainer.max_duration=1ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")


@pytest.mark.slow
def test_a_wheel_works_beside_folders_of_the_same_names(tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"runner"}
    expected = (
        "py.typed",
        "conf/config.yaml",
        "callbacks/__init__.pyi",
        "callbacks/_mlflow/__init__.py",
        "verbs/project/conf/model/two_layers.yaml",
    )
    assert {f"runner/{name}" for name in (*expected, "algorithms/ema.py", "conf/algorithms/ema.yaml")} <= {*names}

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    project = tmp_path / "project"
    for name in ("callbacks", "algorithms", "conf", "tests"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").touch()
    (project / "callbacks" / "mine.py").write_text(OWN)
    env = {**os.environ, "PYTHONPATH": str(site)}
    own = "+callbacks.mine._target_=callbacks.mine.Mine"
    done = run_python(["-m", "runner", *SHORT, own, "+algorithms=ema"], cwd=project, env=env, real=True, check=True)
    assert f"mine at {site}/runner/__init__.py" in done.stdout
    run_python(["-m", "runner", "-m", *SHORT, own, "seed=0,1"], cwd=project, env=env, real=True, check=True)
    statuses = query(project / "outputs" / "mlflow.db", "select status from runs where name not like '%sweep%'")
    assert {*statuses} == {("FINISHED",)} and len(statuses) >= 3
