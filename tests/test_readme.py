"""What the README shows a newcomer, done as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The part of the README under a title."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(text: str, language: str) -> list[str]:
    """The blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_a_model_and_a_callback_of_ones_own_run_and_leave_the_files_of_the_table(tmp_path: Path, run_here: Any):
    shown = section("Your own model, data or callback")
    for group in ("model", "callbacks", "experiment"):
        (tmp_path / "my_conf" / group).mkdir(parents=True)
    files = ["my_models.py", "my_callbacks.py", "my_conf/model/two_layers.yaml", "my_conf/callbacks/epoch_monitor.yaml"]
    files += ["my_conf/experiment/mine.yaml"]
    for file, content in zip(files, code(shown, "python") + code(shown, "yaml"), strict=True):
        (tmp_path / file).write_text(content)
        assert file in shown
    lines = [line for block in code(shown, "bash") for line in block.splitlines()]
    check, train, with_callback, experiment = (line.partition(" # ")[0].split()[3:] for line in lines)
    assert "ClassificationModel(TwoLayers), 9,610 parameters" in run_here(*check, code=0).out
    for chosen in (with_callback, ["--config-dir", "my_conf", "+callbacks=epoch_monitor"]):
        listing = run_here("mode=explain", *chosen, code=0).out
        assert re.search("^epoch_monitor +callback +my_callbacks.EpochMonitor", listing, re.MULTILINE)
    composed = run_here(*experiment, "mode=explain", "explain.format=json", code=0).out
    assert "speed_monitor" in composed and "mlflow_logger" in composed
    assert "TwoLayers" in run_here(*experiment, "mode=check", code=0).out
    run_here(*train, "trainer.max_duration=1ep", "~callbacks.mlflow_logger", code=0)

    (run,) = tmp_path.glob("outputs/20*/*")
    listed = re.findall(r"^\| `([\w.]+)", section("What a run leaves"), re.MULTILINE)
    found = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert found - {"git.patch"} == {*listed} - {"git.patch", "mlflow"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"ep1-ba19", "latest"}
