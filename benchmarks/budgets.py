"""Measure how closely runs keep to a budget of wall-clock time. Keep the machine idle.

    python benchmarks/budgets.py --runs 20 --budget 20s

Each run is a separate command that measures a few steps, trains and evaluates. The output shows the seconds of
training, by the clock of the run, and their deviation from the budget.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_timestamp
from runner.training.budget import Budget


def main() -> None:
    """Train the runs one after another, and print a line for each and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--budget", default="20s", help="time for training")
    parser.add_argument("arguments", nargs="*", default=[], help="arguments of the runner")
    options = parser.parse_args()
    budget = Budget.parse(options.budget).seconds
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            run = Path(folder, str(number))
            overrides = [
                f"budget={options.budget}",
                f"hydra.run.dir={run}",
                "callbacks=[checkpoint_saver]",
                "callbacks.checkpoint_saver.save_interval=0",
            ]
            command = [sys.executable, "-m", "runner", *options.arguments, *overrides]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            recorded = re.findall(r"= (\d+)ba", (run / "config.yaml").read_text())[0]
            seconds = read_timestamp(find_checkpoint(run)).total_wct
            errors.append(100 * (seconds / budget - 1))
            other_load = json.loads((run / "result.json").read_text())["load"]["others"]
            trained = f"{int(recorded):>9,} batches  {seconds:7.2f} s  {errors[-1]:+6.2f} %"
            print(f"{number + 1:>3}  {trained}  other work {other_load:.0%}", flush=True)
    count_within = sum(abs(error) <= 3 for error in errors)
    mean = f"mean {statistics.fmean(errors):+.2f} %, largest {max(errors, key=abs):+.2f} %"
    print(f"{count_within} of {len(errors)} within 3 %; {mean}")


if __name__ == "__main__":
    main()
