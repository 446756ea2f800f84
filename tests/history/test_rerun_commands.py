from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_runs import LONGER, QUIET, ROOT, SHORT, folders, tree, weights


@pytest.mark.slow
def test_a_rerun_is_the_same_experiment_whatever_conf_has_become(tmp_path: Path, run_app: Any):
    for name in ("runner", "callbacks", "algorithms", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "changed" / name, symlinks=True)
    start = (*SHORT, *QUIET, "optimizer.momentum=0.8", "scheduler=none")
    run_app(*start)
    (first,) = folders(tmp_path)
    before = tree(first)

    env = {"PYTHONPATH": str(tmp_path / "changed")}
    conf = tmp_path / "changed" / "conf"
    for file, old, new in (
        ("optimizer/sgd.yaml", "lr: 0.1", "lr: 0.3"),
        ("model/mlp.yaml", "[128, 128]", "[16]"),
        ("config.yaml", "\nseed: 0", "\nseed: 8"),
    ):
        text = (conf / file).read_text()
        assert old in text
        (conf / file).write_text(text.replace(old, new))
    done = run_app("rerun", str(first.relative_to(tmp_path)), env=env, real=True)
    (second,) = folders(tmp_path) - {first}
    assert weights(second) == weights(first)
    assert tree(first) == before
    (line,) = [line for line in done.stderr.splitlines() if "conf/ has changed" in line]
    assert "optimizer.lr: 0.1 -> 0.3" in line and "seed: 0 -> 8" in line and "momentum" not in line
    config, again = (yaml.safe_load((one / "config.yaml").read_text()) for one in (first, second))
    assert again == config

    run_app("rerun", str(second), "optimizer.lr=0.3", "~algorithms.batch_augment", env=env)  # what conf/ now says
    (third,) = folders(tmp_path) - {first, second}
    changed = yaml.safe_load((third / "config.yaml").read_text())
    expected = config | {"optimizer": config["optimizer"] | {"lr": 0.3}}
    expected["algorithms"] = {"label_smoothing": config["algorithms"]["label_smoothing"]}
    assert changed == expected
    assert weights(third) != weights(first)

    # Resumed, it continues unchanged.
    run_app("resume", str(first), LONGER, env=env)
    resumed = yaml.safe_load((first / "config.yaml").read_text())
    assert resumed["trainer"].pop("max_duration") == "3ep"
    assert config["trainer"].pop("max_duration") == "2ep"
    assert resumed == config
    assert yaml.safe_load((first / "sessions" / "1" / "config.yaml").read_text())["trainer"]["max_duration"] == "2ep"
    run_app(*start, LONGER, "hydra.run.dir=whole")
    assert weights(tmp_path / "whole", "ep3-ba9") == weights(first, "ep3-ba9")
