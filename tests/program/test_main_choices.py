"""Choices beyond the defaults: classes and configs of the user, and runs without callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from main_runs import SHORT, query, run_folders


def test_classes_and_configs_of_the_user_are_used(folder: Path, run_here: Any):
    """Classes come from the working directory, and choices from `--config-dir`."""
    for path, text in {
        "more/model/own.yaml": "_target_: own.OwnModel\nunits: 8\n",
        "more/callbacks/greeter.yaml": "greeter:\n  _target_: own.Greeter\n  word: welcome\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    code, out, err = run_here(
        *("--config-dir=more", "model=own", "data.batch_size=400", "trainer.max_duration=1ba"),
        *("+callbacks=greeter", "+callbacks.second._target_=own.Greeter", "~callbacks.mlflow_logger"),
    )
    assert code == 0, err
    assert err == ""
    assert "welcome OwnModel" in out and "hello OwnModel" in out
    (run_dir,) = run_folders(folder)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["model"] == {"_target_": "own.OwnModel", "units": 8}
    unknown = run_here("--config-dir=more", "+callbacks=greeter", "callbacks.greeter.wrod=hi", code=2).err
    message = "error: callbacks.greeter.wrod: callbacks.greeter has no key 'wrod'; did you mean 'word'?"
    assert unknown == f"{message} Allowed: word\n"
    unknown = run_here("--config-dir", "more", "model=own", "model.unit=4", code=2).err
    assert "model has no key 'unit'; did you mean 'units'" in unknown


def test_a_run_without_callbacks_prints_nothing_and_keeps_its_record(folder: Path, run_here: Any):
    code, out, err = run_here(*SHORT, "callbacks=none", "algorithms=none", "scheduler=none")
    assert (code, out, err) == (0, "", "")
    (run_dir,) = run_folders(folder)
    assert {path.name for path in run_dir.iterdir()} >= {"config.yaml", "overrides.yaml", "environment.json"}
    assert query(folder, "select count(*) from runs") == [(0,)]


def test_a_choice_that_replaces_the_defaults_is_warned_of(folder: Path, run_here: Any):
    _, out, err = run_here("explain", "callbacks=speed_monitor", code=0)
    (line,) = err.splitlines()
    assert line.startswith("WARNING: callbacks=speed_monitor replaces mlflow_logger, checkpoint_saver, ")
    assert line.endswith("; +callbacks=speed_monitor adds to them") and "speed_monitor" in out


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["namespace", "package", "module"])
def test_code_of_the_user_may_have_names_of_our_packages(folder: Path, run_app: Any, shape: str):
    """The working directory may have its own `callbacks`, `algorithms`, `conf` and `tests`."""
    for name in ("callbacks", "algorithms", "tests"):
        file = folder / (f"{name}.py" if shape == "module" else f"{name}/mine.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text((folder / "own.py").read_text())
        if shape == "package":
            (folder / name / "__init__.py").touch()
    (folder / "conf").mkdir()
    (folder / "conf" / "config.yaml").write_text("not: ours\n")
    where = "callbacks" if shape == "module" else "callbacks.mine"
    own = (f"+callbacks.mine._target_={where}.Greeter", "+callbacks=speed_monitor", "+algorithms=ema")
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / ".editable")}  # as in an editable install
    done = run_app(*SHORT, *own, "~callbacks.mlflow_logger", folder=folder, env=env, real=True)
    assert "hello" in done.stdout


BROKEN = """
import signal
from runner import Callback

class Broken(Callback):
    def __init__(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("as an interrupted import may raise it") from None
"""


def test_an_error_caused_by_ctrl_c_is_no_error(folder: Path, run_here: Any):
    (folder / "broken.py").write_text(BROKEN)
    ended = run_here(*SHORT, "callbacks=none", "+callbacks.broken._target_=broken.Broken", code=130)
    assert ended.err == ""
    assert run_here("optimizer.lrr=1", code=2).err.startswith(
        "error: optimizer.lrr"
    )  # the next command is not affected
