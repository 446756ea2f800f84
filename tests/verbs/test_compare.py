"""`runner compare` compares the digests, metrics, configs and environments that runs have in their folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.checkpoints.digest import DIGESTS, PARTS
from runner.records.result import Result
from runner.verbs.compare import difference


def write_run(folder: Path, batches: Any, changed: dict[int, tuple[str, ...]] | None = None, **facts: Any) -> Path:
    """Write the folder of a run, with one line of digests per batch.

    Args:
        folder: the folder to create.
        batches: the numbers of the batches.
        changed: by batch, the parts whose digests differ from those of other runs.
        **facts: the contents of `config` and `environment`; `metrics` and `status` of the result. Each may be missing.
    """
    folder.mkdir()
    lines = []
    for batch in batches:
        parts = {part: f"{part} {batch}{'*' * (part in (changed or {}).get(batch, ()))}" for part in PARTS}
        lines.append(json.dumps({"epoch": batch // 4, "batch": batch, **parts}) + "\n")
    (folder / DIGESTS).write_text("".join(lines))
    if "config" in facts:
        (folder / "config.yaml").write_text(yaml.safe_dump(facts["config"]))
    if "environment" in facts:
        (folder / "environment.json").write_text(json.dumps(facts["environment"]))
    if "metrics" in facts:
        Result(facts.get("status", "FINISHED"), "run", "", [], metrics=facts["metrics"]).write(folder)
    return folder


CONFIG = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}, "seed": 0, "run_name": None}
ENVIRONMENT = {"ranks": 1, "threads": 4, "git_commit": "aaaa", "packages": {"torch": "2.13"}, "folder": "here"}


# The last line says whether torch was imported.
EQUAL = """\
        a         b
status  -         -
time    -         -

Digests
  a -> b  ok: equal bit for bit up to batch 8
False
"""
DIFFERENT = """\
                a            b            c
status          finished     finished     -
time            -            -            -
eval/loss       0.25         0.5          -
train/loss      0.125        -            -

Config, where it differs
optimizer.lr    0.1          0.2          0.1
model           -            -            Net\\x1b[31m

Environment, where it differs
ranks           1            2            -
packages.torch  2.13         2.14         -
git.patch       none         1 line       none

Digests
  a -> b  different: at batch 6, in weights, optimizer; equal bit for bit up to
          batch 5
"""


def test_equal_runs_are_reported_as_equal_without_importing_torch(tmp_path: Path):
    a, b = (write_run(tmp_path / name, range(1, 9), config=CONFIG, environment=ENVIRONMENT) for name in "ab")
    program = "import sys; from runner.__main__ import main; code = main(); print('torch' in sys.modules); exit(code)"
    command = [sys.executable, "-c", program, "compare", "a", "b"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0 and finished.stderr == ""
    assert finished.stdout == EQUAL
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert difference(a, b).is_none


def test_differences_in_results_config_and_batches_are_shown(tmp_path: Path, run_here: Any, monkeypatch: Any):
    monkeypatch.setenv("COLUMNS", "80")
    changed = {6: ("weights", "optimizer"), 7: ("randomness", "weights"), 8: PARTS}
    other_config = {**CONFIG, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.2}}
    other_environment = {**ENVIRONMENT, "ranks": 2, "packages": {"torch": "2.14"}, "folder": "there"}
    metrics = {"train/loss": 0.125, "eval/loss": 0.25}
    write_run(tmp_path / "a", range(1, 9), config=CONFIG, environment=ENVIRONMENT, metrics=metrics)
    other_facts = {"config": other_config, "environment": other_environment, "metrics": {"eval/loss": 0.5}}
    write_run(tmp_path / "b", range(1, 9), changed, **other_facts)
    write_run(tmp_path / "c", (), config={**CONFIG, "model": {"_target_": "own.Net\x1b[31m"}})
    (tmp_path / "b" / "git.patch").write_text("+ a line\n")
    finished = run_here("compare", "a", "b", "c", code=1)
    assert finished.out == DIFFERENT
    assert finished.err == ""


@pytest.mark.parametrize(
    ("batches", "changed", "text"),
    [
        ((range(1, 9), range(1, 9)), {1: ("samples",)}, "at batch 1, in samples; the first batch with digests in both"),
        (
            (range(1, 9), range(2, 9, 2)),
            {6: ("weights",)},
            "at batch 6, in weights; .* up to batch 4, with no digests in",
        ),
        ((range(1, 9), range(1, 5)), {}, "up to batch 4; one ends after batch 8, the other after 4"),
        ((range(1, 9), range(4, 13)), {}, "up to batch 8; one ends after batch 8, the other after 12"),
    ],
)
def test_runs_are_compared_at_batches_with_digests_in_both(
    tmp_path: Path, batches: tuple[Any, Any], changed: dict[int, tuple[str, ...]], text: str
):
    comparison = difference(write_run(tmp_path / "a", batches[0]), write_run(tmp_path / "b", batches[1], changed))
    assert re.search(text, str(comparison))
    assert comparison.agree is not bool(changed)
    assert not comparison.is_none


def test_final_metrics_of_finished_runs_are_compared(tmp_path: Path):
    write_run(tmp_path / "a", range(1, 5), metrics={"eval/loss": 0.5, "train/loss": float("nan")})
    write_run(tmp_path / "b", range(1, 5), metrics={"eval/loss": 0.5, "train/loss": float("nan")})
    write_run(tmp_path / "c", range(1, 5), metrics={"eval/loss": 0.25, "train/loss": float("nan")})
    write_run(tmp_path / "d", range(1, 5), metrics={"eval/loss": 0.25}, status="KILLED")
    assert difference(tmp_path / "a", tmp_path / "b").is_none
    comparison = difference(tmp_path / "a", tmp_path / "c")
    assert not comparison.agree and str(comparison) == "equal bit for bit up to batch 4; eval/loss is 0.5 and 0.25"
    assert difference(tmp_path / "a", tmp_path / "d").is_none


def test_latest_names_the_newest_run(run_here: Any):
    folders = [f"outputs/2026-01-01/{time}-00-00" for time in ("09", "10")]
    for folder in folders:
        run_here("model=mlp", "trainer.max_duration=1ba", "callbacks=[checkpoint_saver]", f"hydra.run.dir={folder}")
    runs = json.loads(run_here("compare", "latest", folders[0], "--json", code=0).out)["result"]["runs"]
    assert [Path(run["folder"]).name for run in runs] == ["10-00-00", "09-00-00"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "missing"], "RUN='missing': no such folder"),
        (["a", "empty"], "RUN='empty': has no result.json, config.yaml or digests.jsonl"),
        (["a"], "compare: takes RUN RUN..., not a; write runner compare RUN RUN..., such as runner compare "),
        ([], "compare: needs RUN RUN..."),
        (["a", "a", "optimizer.lrr=3"], "optimizer.lrr"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_in_one_line(tmp_path: Path, run_here: Any, arguments: list[str], message: str):
    write_run(tmp_path / "a", range(1, 5))
    (tmp_path / "empty").mkdir()
    _, out, err = run_here("compare", *arguments, code=2)
    assert message in err and err.count("\n") == 1 and out == ""
    assert sorted(os.listdir(tmp_path)) == ["a", "empty"]
