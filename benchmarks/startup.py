"""Compare the time of a whole `python -m runner` with hand-written scripts for the same work.

    python benchmarks/startup.py

The first script imports torch, composes the same config, reads the same data and trains the same network for the same
steps, without evaluation, metrics, logging, checkpoint or plot. A second script does the work of the main job as in a
tutorial: it reads through torch's DataLoader, logs the loss of each batch with `mlflow.log_metric`, evaluates after
each epoch, and saves the model. All are separate processes with cached bytecode that take turns in one folder, in which
the MLflow store already exists. The output shows median wall times, and medians of the ratios of each round. It also
shows how long a user of the runner waits for the first line on the terminal and for the first batch, compared with a
script that only imports torch and reads the data through scikit-learn.
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

LIMITS = {"by hand": 1.2, "by hand, logged": 0.5, "data by hand": 1.15}
CONF = Path(__file__).resolve().parent.parent / "conf"

DATA = """
import gzip, importlib.util, math, pathlib, sys
import torch
import torch.nn.functional as F
import numpy
folder = pathlib.Path(importlib.util.find_spec("sklearn").origin).parent
with gzip.open(folder / "datasets/data/digits.csv.gz", "rt") as file:
    table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
pixels, classes = table[:, :-1].view(-1, 1, 8, 8) / 16, table[:, -1].long()
images, labels = pixels[:1200], classes[:1200]
"""

TRAINING = """
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    config = compose("config")
from runner.models import ResNet8
torch.manual_seed(0)
net = ResNet8(in_channels=1, num_classes=10, width=16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
epochs = int(config.trainer.max_duration.removesuffix("ep"))
batches = math.ceil(1200 / 64)
total, warm = epochs * batches, 0.15 * epochs * batches
rows = torch.arange(8)

def train(images, labels, step):
    rate = step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
    optimizer.param_groups[0]["lr"] = 0.1 * rate
    padded = F.pad(images, (1, 1, 1, 1))
    down, right = torch.randint(0, 3, (2, len(images), 1))
    sample = torch.arange(len(images))[:, None, None]
    shifted = padded[sample, 0, (down + rows)[:, :, None], (right + rows)[:, None, :]].unsqueeze(1)
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(net(shifted), labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    return loss
"""

PLAIN = """
for epoch in range(epochs):
    for step, index in enumerate(torch.randperm(1200).split(64), epoch * batches):
        train(images[index], labels[index], step)
"""

LOGGED = """
import mlflow
from torch.utils.data import DataLoader, TensorDataset
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("by hand")
loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
held_out = DataLoader(TensorDataset(pixels[1200:], classes[1200:]), batch_size=config.data.eval_batch_size)
with mlflow.start_run():
    for epoch in range(epochs):
        net.train()
        for step, batch in enumerate(loader, epoch * batches):
            mlflow.log_metric("loss", train(*batch, step).item(), step)
        net.eval()
        with torch.no_grad():
            pairs = [(net(inputs), targets) for inputs, targets in held_out]
        outputs, targets = (torch.cat(column) for column in zip(*pairs))
        mlflow.log_metric("eval loss", F.cross_entropy(outputs, targets).item(), step)
        mlflow.log_metric("eval accuracy", (outputs.argmax(1) == targets).float().mean().item(), step)
    torch.save(net.state_dict(), "model.pt")
    mlflow.log_artifact("model.pt")
"""

READ = """
import torch
from sklearn.datasets import load_digits
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
print("the first batch", flush=True)
"""

SCRIPTS = {
    "by hand": DATA + TRAINING + PLAIN,
    "by hand, logged": DATA + TRAINING + LOGGED,
    "data by hand": READ,
}

FIRST_BATCH = """
from runner import Callback

class FirstBatch(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 1:
            print("the first batch", flush=True)
"""
FIRST = "-m", "runner", "trainer.max_duration=1ep", "+callbacks.first_batch._target_=first_batch.FirstBatch"


def watch(folder: Path, *command: str) -> tuple[float, float]:
    """Run Python with arguments in a terminal; return the seconds to its first line and to "the first batch"."""
    terminal, child_end = pty.openpty()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(child_end)
    line = batch = 0.0
    output = b""
    try:
        while not batch:
            output += os.read(terminal, 4096)
            line = line or time.perf_counter() - start
            if b"the first batch" in output:
                batch = time.perf_counter() - start
        while os.read(terminal, 4096):
            pass
    except OSError as error:  # Linux raises it when the command has ended
        if not batch:
            raise RuntimeError(f"no batch was trained: {output.decode(errors='replace')}") from error
    finally:
        os.close(terminal)
    process.wait()
    return line, batch


def main() -> int:
    """Print the ratios; exit code 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after a warm-up round (default 7)")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {key: [] for key in ("python -m runner", *SCRIPTS, "first line", "first batch")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first_batch.py").write_text(FIRST_BATCH)
        for key, script in SCRIPTS.items():
            (folder / f"{key}.py").write_text(script)
        scripts = {key: (f"{key}.py", str(CONF)) for key in ("by hand", "by hand, logged")}
        for number in range(arguments.rounds + 1):
            measured: dict[str, float] = {}
            for key, command in {"python -m runner": ("-m", "runner"), **scripts}.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True, timeout=300)
                measured[key] = time.perf_counter() - start
            measured["first line"], measured["first batch"] = watch(folder, *FIRST)
            _, measured["data by hand"] = watch(folder, "data by hand.py")
            if number:
                for key, seconds in measured.items():
                    times[key].append(seconds)
    for key, values in times.items():
        print(f"{key:>16}: {statistics.median(values):.2f} s  ({min(values):.2f} to {max(values):.2f})")
    failed = False
    for key, limit in LIMITS.items():
        ours = times["first batch" if key == "data by hand" else "python -m runner"]
        ratios = [seconds / hand for seconds, hand in zip(ours, times[key], strict=True)]
        ratio = statistics.median(ratios)
        failed |= ratio > limit
        name = "first batch" if key == "data by hand" else "runner"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{f'{name} / {key}':>27}: {ratio:.2f} times  ({spread}; limit {limit:.2f})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
