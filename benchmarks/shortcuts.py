"""Measure how much time each shortcut around another library saves, see `runner/libraries/shortcuts.py`.

    python benchmarks/shortcuts.py

A command of two batches, a loop of small batches, and sending values to MLflow are run in turn with all shortcuts, and
with each one replaced by the public way. The output shows CPU seconds of the command, including the end of its process,
and CPU microseconds of a batch and of a value: the median over rounds of the difference from the run with all shortcuts
in the same round. The exit code is 1 if a shortcut saves neither 0.1 s of a command nor 3 us of a batch or value, and
so should be removed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy

from runner.libraries.shortcuts import NAMES

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
        start_time = time.thread_time()
        trainer.fit("400ba")
        times.append((time.thread_time() - start_time) / 400)
    print(min(times) * 1e6)
"""
VALUES = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from growth import sent_values
print(sent_values(5000) / 5000 * 1e6)
"""


def command_seconds(public: str) -> float:
    """Return the CPU seconds of a command, including its data workers."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        run(COMMAND, public, folder)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def batch_microseconds(public: str) -> float:
    """Return the CPU microseconds of a batch."""
    return float(run(("-c", BATCHES), public, None).split()[-1])


def value_microseconds(public: str) -> float:
    """Return the CPU microseconds to send a value to MLflow."""
    return float(run(("-c", VALUES), public, None).split()[-1])


def run(arguments: tuple[str, ...], public: str, folder: str | None) -> str:
    """Run Python without some shortcuts, and return its output."""
    env = os.environ | {"RUNNER_PUBLIC_ONLY": public}
    result = subprocess.run([sys.executable, *arguments], env=env, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    return result.stdout


MEASURES = {
    "s of a command": (command_seconds, 0.1),
    "us of a batch": (batch_microseconds, 3.0),
    "us of a value": (value_microseconds, 3.0),
}
"""The measures, and the least that a shortcut must save of at least one of them."""


def main() -> int:
    """Measure in turn, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    cases = ("", *NAMES, "1")
    costs = numpy.array([[[cost(case) for cost, _ in MEASURES.values()] for case in cases] for _ in range(rounds)])
    least = [least for _, least in MEASURES.values()]
    print(f"{'':<24}{''.join(f'{name:>16}' for name in MEASURES)}")
    useless = []
    for number, case in enumerate(cases):
        name = {"": "with all shortcuts", "1": "saved by all"}.get(case, f"saved by {case}")
        values = numpy.median(costs[:, number] - (costs[:, 0] if number else 0), axis=0)
        print(f"{name:<24}{''.join(f'{value:>16.2f}' for value in values)}")
        if (values < least).all():
            useless.append(case)
    if useless:
        print(f"saves too little: {', '.join(useless)}")
    return bool(useless)


if __name__ == "__main__":
    sys.exit(main())
