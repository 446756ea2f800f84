"""An exit in a user's code is a failure whose traceback shows it, and never a success."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from runner.distributed.session import ending
from runner.failures.errors import UnexpectedExit
from runner.failures.exits import as_failure, exits_as_failures

OWN = """
import os, sys
import torch
from runner import Callback
from runner.data import DatasetLoader
from runner.models import MLP

def leave(place):
    if os.environ.get("PLACE") == place:
        {leave}

leave("import")

class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        leave("data")
        return torch.zeros(4), 1

def load(num_workers=0):
    leave("load")
    return DatasetLoader(Numbers(), 4, shuffle=False, num_workers=num_workers), None

class Network(MLP):
    def __init__(self, width):
        super().__init__(4, [width], 10)
        leave("constructor")
        if width == 3:
            leave("third")

    def forward(self, inputs):
        leave("forward")
        return super().forward(inputs)

class Leaver(Callback):
    def batch_end(self, state, logger):
        leave("callback")
"""
OVERRIDES = ("data=own", "model=own", "algorithms=none", "callbacks=[console_summary]", "trainer.max_duration=1ep")
CALLBACK = "+callbacks.leaver._target_=own.Leaver"
MODEL = "_target_: runner.ClassificationModel\nnum_classes: 10\nmodule: {_target_: own.Network, width: 2}\n"


def prepare(folder: Path, leave: str) -> None:
    (folder / "own.py").write_text(OWN.format(leave=leave))
    for group, text in {"data": "_target_: own.load\n", "model": MODEL}.items():
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "own.yaml").write_text(text)


@pytest.mark.parametrize(
    ("place", "leave"),
    [
        *((place, "sys.exit(0)") for place in ("import", "data", "callback")),
        *(pytest.param(place, "sys.exit(0)", marks=pytest.mark.slow) for place in ("load", "constructor", "forward")),
        pytest.param("data", "raise GeneratorExit", marks=pytest.mark.slow),
        ("data", "raise KeyboardInterrupt"),
    ],
)
def test_an_exit_in_the_users_code_fails_the_run_and_shows_its_line(
    tmp_path: Path, run_here: Any, monkeypatch: Any, place: str, leave: str
):
    prepare(tmp_path, leave)
    monkeypatch.setenv("PLACE", place)
    finished = run_here(*OVERRIDES, CALLBACK, code=1)
    assert "own.py:10, in leave" in finished.err.replace(str(tmp_path), "")
    statuses = [json.loads(file.read_text())["status"] for file in tmp_path.glob("outputs/*/*/result.json")]
    assert statuses == ([] if place == "import" else ["FAILED"])


def test_a_sweep_continues_after_a_job_that_exits(tmp_path: Path, run_app: Any):
    prepare(tmp_path, "sys.exit(0)")
    run_app("-m", *OVERRIDES, "model.module.width=3,4", exit_code=1, env={"PLACE": "third"})
    statuses = sorted(json.loads(file.read_text())["status"] for file in tmp_path.glob("outputs/**/result.json"))
    assert statuses == ["FAILED", "FINISHED"]


def test_exits_are_failures_unless_a_signal_caused_them():
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises((SystemExit, KeyboardInterrupt)), exits_as_failures():
            exit_by_signal(number)
    with (
        pytest.raises(UnexpectedExit, match=r"SystemExit\(3\) raised at .*test_exits.py:\d+, in test_exits"),
        exits_as_failures(),
    ):
        raise SystemExit(3)
    assert as_failure(error := ValueError()) is error


def exit_by_signal(number: int) -> None:
    from runner.distributed.session import end

    before = signal.getsignal(number)
    try:
        end(number, None)
    finally:
        signal.signal(number, before)
    assert ending(number)
