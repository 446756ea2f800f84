"""Whether a change that should alter no number alters none: runs of two commits, compared to the bit.

    python benchmarks/same_numbers.py [COMMIT]

Each case is trained once from the working tree and once from COMMIT (default: HEAD), in folders of their own and with
this interpreter. What is compared: the weights of the last checkpoint, the digests of every batch (samples, contents,
randomness, weights, optimizer) and every metric that is no time. One line a case; exit code 1 where any differs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
WATCH = (
    *("~callbacks.mlflow_logger", "~callbacks.learning_curves", "+callbacks=[state_digest,json_lines_logger]"),
    "callbacks.state_digest.interval=1ba",
)
CASES: dict[str, list[tuple[str, ...]]] = {
    "default": [("trainer.max_duration=3ep",)],
    "digits_fast": [("experiment=digits_fast", "trainer.max_duration=4ep")],
    "stdlib_lm_plain": [("experiment=stdlib_lm_plain", "trainer.max_duration=200ba")],
    "two ranks": [("launch.nproc_per_node=2", "trainer.max_duration=2ep")],
    "two ranks, windows": [("experiment=stdlib_lm_plain", "launch.nproc_per_node=2", "trainer.max_duration=50ba")],
    "resumed": [
        ("trainer.max_duration=2ep", "+algorithms=[ema,mixup]"),
        ("resume", "run", "trainer.max_duration=4ep"),
    ],
}
TIMED = re.compile("time|throughput|memory|system|second")


def train(tree: Path, folder: Path, commands: list[tuple[str, ...]]) -> Path:
    """Run the commands of a case with the code of a tree; return the run's folder."""
    for number, command in enumerate(commands):
        arguments = command if number else (*command, *WATCH, "hydra.run.dir=run")
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "runner", *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    return folder / "run"


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


def differences(before: Path, after: Path) -> list[str]:
    """Return what differs between two runs."""
    found = []
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
            for case, commands in CASES.items():
                runs = []
                for name, code in (("before", tree), ("after", ROOT)):
                    folder = Path(place) / case.replace(" ", "_") / name
                    folder.mkdir(parents=True)
                    runs.append(train(code, folder, commands))
                found = differences(*runs)
                differing += bool(found)
                print(f"{case:20} {'differs: ' + ', '.join(found) if found else 'equal to the bit'}", flush=True)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
