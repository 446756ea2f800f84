"""How long `python -m runner` takes as a whole, against the same work by hand.

    python benchmarks/startup.py

By hand means: import torch, compose the same config, read the same data, train the same network for the same steps,
and nothing else: no evaluation, metrics, logging, checkpoint or plot. A second script does what the main job does, as
tutorials would: it reads through torch's DataLoader, logs the loss of each batch with `mlflow.log_metric`, evaluates
after each epoch, and saves the model. All are whole processes with cached bytecode,
run in turn in one folder whose MLflow store exists already; printed are the median wall times and the median ratios,
round by round. Of the runner it is also printed how long a user waits for the first line on the terminal, and for the
first batch, against a script that only imports torch and, with scikit-learn, the data.
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
            found = [(net(inputs), targets) for inputs, targets in held_out]
        outputs, targets = (torch.cat(one) for one in zip(*found))
        mlflow.log_metric("eval loss", F.cross_entropy(outputs, targets).item(), step)
        mlflow.log_metric("eval accuracy", (outputs.argmax(1) == targets).float().mean().item(), step)
    torch.save(net.state_dict(), "model.pt")
    mlflow.log_artifact("model.pt")
"""

READ = """
import torch
from sklearn.datasets import load_digits
images, labels = (torch.from_numpy(one) for one in load_digits(return_X_y=True))
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
    """Run a command of Python's in a terminal, and return when its first line and "the first batch" came.

    Both are seconds since the command was started.
    """
    ours, theirs = pty.openpty()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
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
    """Print the ratios; exit code 1 when one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after one that is not (default 7)")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {key: [] for key in ("python -m runner", *SCRIPTS, "first line", "first batch")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first_batch.py").write_text(FIRST_BATCH)
        for key, script in SCRIPTS.items():
            (folder / f"{key}.py").write_text(script)
        whole = {key: (f"{key}.py", str(CONF)) for key in ("by hand", "by hand, logged")}
        for number in range(arguments.rounds + 1):
            found: dict[str, float] = {}
            for key, command in {"python -m runner": ("-m", "runner"), **whole}.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True, timeout=300)
                found[key] = time.perf_counter() - start
            found["first line"], found["first batch"] = watch(folder, *FIRST)
            _, found["data by hand"] = watch(folder, "data by hand.py")
            if number:
                for key, seconds in found.items():
                    times[key].append(seconds)
    for key, values in times.items():
        print(f"{key:>16}: {statistics.median(values):.2f} s  ({min(values):.2f} to {max(values):.2f})")
    failed = False
    for key, limit in LIMITS.items():
        ours = times["first batch" if key == "data by hand" else "python -m runner"]
        ratios = [one / hand for one, hand in zip(ours, times[key], strict=True)]
        ratio = statistics.median(ratios)
        failed |= ratio > limit
        name = "first batch" if key == "data by hand" else "runner"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{f'{name} / {key}':>27}: {ratio:.2f} times  ({spread}; limit {limit:.2f})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
