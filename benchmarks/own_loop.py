"""Measure what `runner.Recorder` adds to a step of a hand-written loop: at most 3 us of its thread, without digests.

    python benchmarks/own_loop.py

The loop is that of `overhead.py`: an MLP at batch 32 with one thread, 400 steps a round. Plain and recorded rounds take
turns. Training waits only for the time of the loop's own thread. The time of the process includes the thread that reads
values back and writes them to the spool, which can use another core.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from overhead import BATCH, BATCHES, make_data, make_module

from runner import Recorder

LIMIT = 3.0  # microseconds of the loop's thread


def train(recorder: Recorder | None) -> tuple[float, float]:
    """Train an epoch, and return the seconds of this thread and of the process in a step."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batches = [*zip(*(tensor.split(BATCH) for tensor in make_data()), strict=True)]
    thread, process = time.thread_time(), time.process_time()
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        if recorder is not None:
            recorder.batch(loss)
    return (time.thread_time() - thread) / BATCHES, (time.process_time() - process) / BATCHES


def main() -> int:
    """Print microseconds and ratios; exit code 1 if a call takes longer than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 400 steps of each (default 40)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), Recorder({"seed": 0}) as recorder:
        pairs = [(train(None), train(recorder)) for _ in range(rounds + 2)][2:]
    plain = [statistics.median(by_hand[which] for by_hand, _ in pairs) for which in (0, 1)]
    print(f"hand-written loop: {1e6 * plain[0]:.0f} us a step, torch {torch.__version__}, one thread")
    more = [statistics.median(1e6 * (ours[which] - by_hand[which]) for by_hand, ours in pairs) for which in (0, 1)]
    print(f"  the loop's thread: {more[0]:.1f} us more, {1 + more[0] / 1e6 / plain[0]:.3f} times (limit {LIMIT:g} us)")
    print(f"  the whole process: {more[1]:.1f} us more, {1 + more[1] / 1e6 / plain[1]:.3f} times")
    return int(more[0] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
