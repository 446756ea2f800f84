"""`runner lr-range`: it suggests a learning rate, refuses wrong ranges, and writes only the picture."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from composed_configs import small_experiment

from runner.cli.command import Command
from runner.failures.errors import WrongKey
from runner.verbs.lr_range import check

WITH_SGD = small_experiment(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1})
SHORT = ("lr-range", "model=mlp", "--batches=40")


@pytest.mark.parametrize(
    ("options", "optimizer", "message"),
    [
        ({"start": 0.0}, ..., "--start=0.0: must be a learning rate above 0"),
        ({"start": math.nan}, ..., "--start=nan: must be a learning rate above 0"),
        ({"end": math.inf}, ..., "--end=inf: must be a learning rate above 0"),
        ({"end": 1e-6}, ..., "--end=1e-06: must be larger than --start 1e-05"),
        ({"batches": 19}, ..., "--batches=19: too few to see a slope; give at least 20"),
        ({"picture": "x.jpg"}, ..., "--picture='x.jpg': must end in .png"),
        ({}, None, "optimizer: none is chosen"),
        ({}, {}, "optimizer={}: needs a `_target_`"),
        ({}, {"generator": {"_target_": "a"}, "critic": {"_target_": "b"}}, "of one optimizer, not generator, critic"),
        ({}, {"_target_": "mine"}, "optimizer.lr=None: lr-range varies it"),
        ({}, {"_target_": "mine", "lr": 0.0}, "optimizer.lr=0.0: "),
    ],
)
def test_wrong_options_and_optimizers_are_refused(options: dict[str, Any], optimizer: Any, message: str):
    check(Command.of("lr-range"), WITH_SGD)
    with pytest.raises(WrongKey, match=re.escape(message)):
        experiment = WITH_SGD if optimizer is ... else small_experiment(optimizer=optimizer)
        check(Command.of("lr-range", **options), experiment)


def test_only_the_picture_is_written(tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    out = run_here(*SHORT, "--picture=pictures/mine.png", code=0).out
    assert re.search(r"^ok suggestion +optimizer\.lr=0\.\d+$", out, re.MULTILINE)
    assert (tmp_path / "pictures" / "mine.png").read_bytes().startswith(b"\x89PNG")
    error = run_here(*SHORT, "--start=500", "--end", "1000", code=2).err
    assert re.search(r"error: --start=500: the loss diverged after \d+ batches, at .*give a smaller", error)
    assert {*os.listdir(tmp_path)} - {"temporary", "pictures"} == set()
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.slow
def test_two_ranks_suggest_the_rate_of_one_process(tmp_path: Path, run_app: Any):
    runs = [run_app(*SHORT, f"launch.nproc_per_node={ranks}", f"--picture={ranks}.png") for ranks in (1, 2)]
    rates = [float(re.findall(r"optimizer\.lr=([\d.e-]+)", run.stdout)[0]) for run in runs]
    assert rates[1] == pytest.approx(rates[0], rel=0.3) and (tmp_path / "2.png").exists()
