"""How long `python -m runner` takes as a whole, against the same work by hand.

    python benchmarks/startup.py

By hand means: import torch, compose the same config, read the same data, train the same network for the same steps,
and nothing else: no evaluation, metrics, logging, checkpoint or plot. Both are whole processes with cached bytecode,
run in turn in one folder whose MLflow store exists already; printed are the median wall times and the median ratio,
pair by pair. Of the runner it is also printed how long a user waits for the first line on the terminal, and for the
first batch.
"""

from __future__ import annotations

import argparse
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.3
CONF = Path(__file__).resolve().parent.parent / "conf"

BY_HAND = """
import gzip, importlib.util, math, pathlib, sys
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    config = compose("config")
from runner.models import ResNet8
import numpy
folder = pathlib.Path(importlib.util.find_spec("sklearn").origin).parent
with gzip.open(folder / "datasets/data/digits.csv.gz", "rt") as file:
    table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
images, labels = table[:1200, :-1].view(-1, 1, 8, 8), table[:1200, -1].long()
images = images / 16
torch.manual_seed(0)
net = ResNet8(in_channels=1, num_classes=10, width=16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
epochs = int(config.trainer.max_duration.removesuffix("ep"))
batches = math.ceil(1200 / 64)
total, warm, step = epochs * batches, 0.15 * epochs * batches, 0
rows = torch.arange(8)
for epoch in range(epochs):
    order = torch.randperm(1200)
    for start in range(0, 1200, 64):
        index = order[start : start + 64]
        rate = step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
        optimizer.param_groups[0]["lr"] = 0.1 * rate
        padded = F.pad(images[index], (1, 1, 1, 1))
        down, right = torch.randint(0, 3, (2, len(index), 1))
        sample = torch.arange(len(index))[:, None, None]
        shifted = padded[sample, 0, (down + rows)[:, :, None], (right + rows)[:, None, :]].unsqueeze(1)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(shifted), labels[index], label_smoothing=0.1).backward()
        optimizer.step()
        step += 1
"""

FIRST_BATCH = """
from runner import Callback

class FirstBatch(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 1:
            print("the first batch", flush=True)
"""


def watch(folder: Path) -> tuple[float, float]:
    """Run the default command in a terminal for one epoch, and return when the first line and the first batch came.

    Both are seconds since the command was started.
    """
    command = [sys.executable, "-m", "runner", "trainer.max_duration=1ep"]
    ours, theirs = pty.openpty()
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "+callbacks.first_batch._target_=first_batch.FirstBatch"],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    line = batch = 0.0
    shown = b""
    try:
        while not batch:
            shown += os.read(ours, 4096)
            line = line or time.perf_counter() - start
            if b"the first batch" in shown:
                batch = time.perf_counter() - start
        while os.read(ours, 4096):
            pass
    except OSError as error:  # Linux says so when the command has ended
        if not batch:
            raise RuntimeError(f"no batch was trained: {shown.decode(errors='replace')}") from error
    finally:
        os.close(ours)
    process.wait()
    return line, batch


def main() -> int:
    """Print the ratio; exit code 1 when it is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="counted pairs of runs, after one that is not (default 7)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "by_hand.py").write_text(BY_HAND)
        commands = {
            "python -m runner": [sys.executable, "-m", "runner"],
            "by hand": [sys.executable, str(folder / "by_hand.py"), str(CONF)],
        }
        times: dict[str, list[float]] = {key: [] for key in commands}
        (folder / "first_batch.py").write_text(FIRST_BATCH)
        waits: list[tuple[float, float]] = []
        for pair in range(arguments.pairs + 1):
            for key, command in commands.items():
                start = time.perf_counter()
                subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300, env=dict(os.environ))
                if pair:
                    times[key].append(time.perf_counter() - start)
            if pair:
                waits.append(watch(folder))
    for key, values in times.items():
        print(f"{key:>16}: {statistics.median(values):.2f} s  ({min(values):.2f} to {max(values):.2f})")
    for name, values in zip(("first line", "first batch"), zip(*waits, strict=True), strict=True):
        print(f"{name:>16}: {statistics.median(values):.2f} s  ({min(values):.2f} to {max(values):.2f})")
    ratios = [ours / hand for ours, hand in zip(*times.values(), strict=True)]
    ratio = statistics.median(ratios)
    print(f"{'ratio':>16}: {ratio:.2f} times  ({min(ratios):.2f} to {max(ratios):.2f}; limit {LIMIT:.2f})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
