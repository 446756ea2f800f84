"""What each shortcut around another library saves: see `runner/libraries/shortcuts.py`.

    python benchmarks/shortcuts.py

A command of two batches, and a loop of small batches, are run in turn with all shortcuts, and with the public way in
place of each. Printed are CPU seconds of the command, with the end of its process, and CPU microseconds of a batch:
the median over the rounds of the difference from the run with all shortcuts in the same round. A shortcut that saves
neither 0.1 s of a command nor 3 us of a batch is to go: then the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from runner.libraries.shortcuts import NAMES

LEAST_SECONDS = 0.1
LEAST_MICROSECONDS = 3.0
COMMAND = ("-m", "runner", "trainer.max_duration=2ba", "~callbacks.mlflow_logger")
BATCHES = """
import time, torch
torch.set_num_threads(1)
from runner import ClassificationModel, Trainer
from runner.data import TensorLoader
data = TensorLoader(torch.randn(64, 8), torch.randint(4, (64,)), batch_size=8, shuffle=False)
model = ClassificationModel(torch.nn.Linear(8, 4), 4)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
with Trainer(model=model, train_dataloader=data, optimizers=sgd, device="cpu", progress_bar=False) as trainer:
    trainer.fit("500ba")
    times = []
    for _ in range(10):
        began = time.thread_time()
        trainer.fit("400ba")
        times.append((time.thread_time() - began) / 400)
    print(min(times) * 1e6)
"""


def command_seconds(public: str) -> float:
    """Return the CPU seconds of a command, its data workers included."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        run(COMMAND, public, folder)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def batch_microseconds(public: str) -> float:
    """Return the CPU microseconds of a batch."""
    return float(run(("-c", BATCHES), public, None).split()[-1])


def run(arguments: tuple[str, ...], public: str, folder: str | None) -> str:
    """Run Python without some shortcuts, and return what it prints."""
    env = os.environ | {"RUNNER_PUBLIC_ONLY": public}
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def main() -> int:
    """Measure in turn, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    cases = ("", *NAMES, "1")
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    microseconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            seconds[case].append(command_seconds(case))
            microseconds[case].append(batch_microseconds(case))

    def saved(values: dict[str, list[float]], case: str) -> float:
        return statistics.median(slow - fast for slow, fast in zip(values[case], values[""], strict=True))

    print(f"with all shortcuts: a command {statistics.median(seconds['']):.2f} s,", end=" ")
    print(f"a batch {statistics.median(microseconds['']):.0f} us of CPU time")
    idle = []
    print(f"{'saved by':<14}{'s of a command':>16}{'us of a batch':>16}")
    for case in cases[1:]:
        name = "all" if case == "1" else case
        print(f"{name:<14}{saved(seconds, case):>16.2f}{saved(microseconds, case):>16.1f}")
        if saved(seconds, case) < LEAST_SECONDS and saved(microseconds, case) < LEAST_MICROSECONDS:
            idle.append(name)
    if idle:
        print(f"saves too little: {', '.join(idle)}")
    return bool(idle)


if __name__ == "__main__":
    sys.exit(main())
