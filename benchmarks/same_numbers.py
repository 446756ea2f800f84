"""Whether a change that should alter no number alters none: runs of two commits, compared to the bit.

    python benchmarks/same_numbers.py [COMMIT]

Each case is trained once from the working tree and once from COMMIT (default: HEAD), in folders of their own and with
this interpreter. What is compared: the weights of the last checkpoint, the digests of every batch (samples, contents,
randomness, weights, optimizer), every metric that is no time, the recorded config, and the files that a case names. One
line a case; exit code 1 where any differs. COMMIT must know the commands: they begin with verbs.
"""

from __future__ import annotations

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
        commands: their arguments; the first also keeps digests and metrics, in the folder `run`.
        runs: the folders of the runs that are compared; patterns may match several.
        files: further files that are compared byte by byte.
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
        place = f"hydra.{'sweep' if '-m' in command else 'run'}.dir=run"
        arguments = command if number else (*command, *WATCH, place)
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "runner", *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}")


def digests_of(run: Path) -> list[Any]:
    """Return the digests of each batch."""
    return [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]


def points_of(run: Path) -> list[tuple[int, str, float]]:
    """Return each metric that is not a time, as (batch, key, value)."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sorted(
        (line["step"], key, value)
        for line in lines
        if "metrics" in line
        for key, value in line["metrics"].items()
        if not TIMED.search(key)
    )


def differences(case: Case, before: Path, after: Path) -> list[str]:
    """Return what differs between the folders in which the commands of a case ran."""
    runs = [sorted(folder.glob(case.runs)) for folder in (before, after)]
    if not runs[0] or [run.name for run in runs[0]] != [run.name for run in runs[1]]:
        return [f"runs {[[run.name for run in one] for one in runs]}"]
    found = [f"{name} of {a.name}" for a, b in zip(*runs, strict=True) for name in differences_of_runs(a, b)]
    return found + [name for name in case.files if (before / name).read_bytes() != (after / name).read_bytes()]


def differences_of_runs(before: Path, after: Path) -> list[str]:
    """Return what differs between two runs."""
    found = []
    if (before / "config.yaml").read_text() != (after / "config.yaml").read_text():
        found.append("config")
    last = [torch.load(run / "checkpoints" / "latest" / "model.pt", weights_only=True) for run in (before, after)]
    if last[0].keys() != last[1].keys() or not all(torch.equal(last[0][key], last[1][key]) for key in last[0]):
        found.append("weights")
    for name, read in (("digests", digests_of), ("metrics", points_of)):
        values = [read(run) for run in (before, after)]
        if not values[0]:
            found.append(f"no {name}")
        elif values[0] != values[1]:
            found.append(name)
    return found


def main() -> int:
    """Compare all cases, and print a line for each."""
    commit = (sys.argv[1:] or ["HEAD"])[0]
    differing = 0
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            for title, case in CASES.items():
                folders = [Path(place, title.replace(" ", "_"), name) for name in ("before", "after")]
                for folder, code in zip(folders, (tree, ROOT), strict=True):
                    folder.mkdir(parents=True)
                    train(code, folder, case)
                found = differences(case, *folders)
                differing += bool(found)
                print(f"{title:22} {'differs: ' + ', '.join(found) if found else 'equal to the bit'}", flush=True)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
