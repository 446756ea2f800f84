"""Check that a change to the code changes no number: compare runs of two commits bit for bit.

    python benchmarks/same_numbers.py [COMMIT]

Each case is trained once from the working tree and once from COMMIT (default: HEAD), in separate folders and with this
interpreter. The comparison covers the weights of the last checkpoint, the digests of every batch (samples, contents,
randomness, weights, optimizer), every metric except times, the recorded config, and the files that a case names. The
output has a line for each case; the exit code is 1 if any differs. COMMIT must have the verbs of these commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
WATCH = (
    *("~callbacks.mlflow_logger", "~callbacks.learning_curves", "+callbacks=[state_digest,json_lines_logger]"),
    "callbacks.state_digest.interval=1ba",
)
SHORT = "trainer.max_duration=2ep"


@dataclass(frozen=True)
class Case:
    """Commands that run one after another in one folder, and the results to compare.

    Attributes:
        commands: arguments of each command; the first one also keeps digests and metrics, in the folder `run`.
        runs: pattern for the folders of the runs to compare.
        files: further files to compare byte by byte.
    """

    commands: tuple[tuple[str, ...], ...]
    runs: str = "run"
    files: tuple[str, ...] = ()


CASES = {
    "default": Case((("trainer.max_duration=3ep",),)),
    "digits_fast": Case((("experiment=digits_fast", "trainer.max_duration=4ep"),)),
    "stdlib_lm_plain": Case((("experiment=stdlib_lm_plain", "trainer.max_duration=200ba"),)),
    "two ranks": Case((("launch.nproc_per_node=2", SHORT),)),
    "two ranks, windows": Case(
        (("experiment=stdlib_lm_plain", "launch.nproc_per_node=2", "trainer.max_duration=50ba"),)
    ),
    "resumed": Case(((SHORT, "+algorithms=[ema,mixup]"), ("resume", "run", "trainer.max_duration=4ep"))),
    "sweep": Case((("-m", SHORT, "optimizer.lr=0.05,0.1", "seed=0,1"),), runs="run/*lr*"),
    "fork": Case(
        ((SHORT,), ("fork", "run", "ba13", "optimizer.lr=0.02", "trainer.max_duration=3ep", "hydra.run.dir=fork")),
        runs="fork",
    ),
    "rerun from its record": Case(
        ((SHORT, "+algorithms=mixup"), ("rerun", "run", "hydra.run.dir=again")), runs="again"
    ),
    "replay": Case(
        ((SHORT, "+algorithms=mixup"), ("replay", "run", "ba13", "--to", "batch.safetensors", "--picture=")),
        files=("batch.safetensors",),
    ),
}
TIMED = re.compile("time|throughput|memory|system|second")


def train(tree: Path, folder: Path, case: Case) -> None:
    """Run the commands of a case with the code of a tree."""
    for number, command in enumerate(case.commands):
        run_dir = f"hydra.{'sweep' if '-m' in command else 'run'}.dir=run"
        arguments = command if number else (*command, *WATCH, run_dir)
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-m", "runner", *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        if result.returncode:
            raise SystemExit(f"{' '.join(arguments)}\n{result.stdout}\n{result.stderr}")


def digests_of(run: Path) -> list[Any]:
    """Return the digests of each batch of a run."""
    return [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]


def points_of(run: Path) -> list[tuple[int, str, float]]:
    """Return the values of metrics that are not times, as (batch, key, value)."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sorted(
        (line["step"], key, value)
        for line in lines
        if "metrics" in line
        for key, value in line["metrics"].items()
        if not TIMED.search(key)
    )


def differences(case: Case, before: Path, after: Path) -> list[str]:
    """Return the differences between two folders in which the commands of a case ran."""
    runs = [sorted(folder.glob(case.runs)) for folder in (before, after)]
    if not runs[0] or [run.name for run in runs[0]] != [run.name for run in runs[1]]:
        return [f"runs {[[run.name for run in side] for side in runs]}"]
    different = [f"{name} of {a.name}" for a, b in zip(*runs, strict=True) for name in differences_of_runs(a, b)]
    return different + [name for name in case.files if (before / name).read_bytes() != (after / name).read_bytes()]


def differences_of_runs(before: Path, after: Path) -> list[str]:
    """Return the differences between two runs."""
    different = []
    if (before / "config.yaml").read_text() != (after / "config.yaml").read_text():
        different.append("config")
    old, new = (torch.load(run / "checkpoints/latest/model.pt", weights_only=True) for run in (before, after))
    if old.keys() != new.keys() or not all(torch.equal(old[key], new[key]) for key in old):
        different.append("weights")
    for name, read in (("digests", digests_of), ("metrics", points_of)):
        values = [read(run) for run in (before, after)]
        if not values[0]:
            different.append(f"no {name}")
        elif values[0] != values[1]:
            different.append(name)
    return different


def main() -> int:
    """Compare all cases, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="commit to compare with (default HEAD)")
    commit = parser.parse_args().commit
    differing = 0
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            for title, case in CASES.items():
                folders = [Path(parent, title.replace(" ", "_"), name) for name in ("before", "after")]
                for folder, code in zip(folders, (tree, ROOT), strict=True):
                    folder.mkdir(parents=True)
                    train(code, folder, case)
                different = differences(case, *folders)
                differing += bool(different)
                print(f"{title:22} {'differs: ' + ', '.join(different) if different else 'bit-identical'}", flush=True)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
