"""Compare the time of a training step in this project and in other libraries, in one run in which they take turns.

    python benchmarks/peers.py                   # every library; about ten minutes, and 250 MB of packages at first
    python benchmarks/peers.py ignite lightning  # only these, the hand-written loop and this project

Each library has an environment of its own in build/peers with its further packages; it also sees the packages of this
environment, so that all use the same torch. If a library cannot be installed or run, the output says why.

All train the same network on the same ready-made batches, in one thread, with plain SGD. The processes of the libraries
take turns, a window of steps each. The CPU time of the whole process, including its background threads, is measured
from the start of one window to the start of the next. The ratio to the hand-written loop is computed for each window;
the output is the median. The loop of each library is in `_peer_loops.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _peer_loops import NAMES, SETTINGS, TASKS

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "build" / "peers"
TITLES = {
    "bare": "no callbacks",
    "callbacks": "ten callbacks, five at the start of a step and five at its end, that do nothing",
    "logged": "no callbacks; the loss of each step goes to TensorBoard",
}
NO_CALLBACKS = ("torch", "accelerate")
REQUIRED: dict[str, list[str]] = {
    "ignite": ["pytorch-ignite", "tensorboard"],
    "accelerate": ["accelerate", "tensorboard"],
    "mmengine": ["mmengine", "tensorboard"],
    "lightning": ["lightning", "tensorboard"],
    "transformers": ["transformers", "accelerate", "tensorboard"],
    # Its metadata requires torch < 2.7.1, but it works with newer versions, so it is installed without dependencies.
    "composer": [
        "--no-deps", "mosaicml==0.32.1", "mosaicml-cli", "argcomplete", "arrow", "backoff", "coolname", "docker", "gql",
        "prompt-toolkit", "py-cpuinfo", "pytorch-ranger", "questionary", "ruamel.yaml", "tabulate", "tenacity",
        "torch-optimizer", "torchvision", "validators", "websockets",
    ],
}  # fmt: skip
"""Packages that pip installs for each library, in addition to those of this environment."""


def environment(name: str) -> str:
    """Return the Python of a library's environment, and create the environment if it does not exist.

    Raises:
        RuntimeError: pip failed; the message ends with its last line.
    """
    if name not in REQUIRED:
        return sys.executable
    folder = ENVIRONMENTS / name
    installed, python = folder / "installed.json", folder / "bin" / "python"
    if not installed.exists() or json.loads(installed.read_text()) != REQUIRED[name]:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False)
        variables = {"base": str(folder), "platbase": str(folder)}
        packages, parent = sysconfig.get_path("purelib", vars=variables), sysconfig.get_path("purelib")
        Path(packages, "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *REQUIRED[name]]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"pip could not install it: {_last(result.stderr)}")
        installed.write_text(json.dumps(REQUIRED[name]))
    return str(python)


class Peer:
    """The process of a library, which trains a window of steps on request.

    Args:
        name: a key of `NAMES`.
        task: a key of `TASKS`.
        setting: one of `SETTINGS`.
        windows: number of windows.
        folder: a folder for its files.

    Raises:
        RuntimeError: the library cannot be installed, or its process ended; the message ends with its last line.
    """

    def __init__(self, name: str, task: str, setting: str, windows: int, folder: Path) -> None:
        self.name = name
        self._steps = windows * TASKS[task]
        self.seconds: list[float] = []
        """CPU seconds of each window."""
        folder.mkdir()
        self._errors = folder / "stderr.txt"
        command = [environment(name), str(ROOT / "benchmarks" / "_peer_loops.py"), name, task, setting, str(windows)]
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        # Keep freed memory: when glibc returns it depends on the imported packages, and changes a ResNet step by 10 %.
        variables |= {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "1073741824"}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version: str = self._read()["version"]
        self._clock: float = self._read()["seconds"]

    def train(self) -> None:
        """Train a window of steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._read()
        self.seconds.append(answer["seconds"] - self._clock)
        self._clock = answer["seconds"]
        if "logged" in answer and answer["logged"] < self._steps:
            raise RuntimeError(f"only {answer['logged']} losses of {self._steps} were logged")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended: {_last(self._errors.read_text())}")
        return json.loads(line)


def measure(names: list[str], task: str, setting: str, rounds: int, failed: dict[str, str]) -> dict[str, Peer]:
    """Return the libraries with the seconds of each window, and add the reason of each failure to `failed`.

    Raises:
        RuntimeError: the hand-written loop failed, so nothing can be compared.
    """
    peers: dict[str, Peer] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in names:
            if name in failed or (setting == "callbacks" and name in NO_CALLBACKS[1:]):
                continue
            try:
                peers[name] = Peer(name, task, setting, rounds + 1, Path(folder, name))
                stack.callback(peers[name].end)
            except RuntimeError as error:
                failed[name] = str(error)
        for _ in range(rounds + 1):  # the first window warms up
            for name, peer in [*peers.items()]:
                try:
                    peer.train()
                except RuntimeError as error:
                    failed[name] = str(error)
                    del peers[name]
    if "torch" in failed:
        raise RuntimeError(f"the loop by hand failed: {failed['torch']}")
    return peers


def show(peers: dict[str, Peer], task: str, setting: str) -> None:
    """Print a row for each library, the cheapest first."""
    hand = [seconds / TASKS[task] for seconds in peers["torch"].seconds[1:]]
    print(f"\n{task}, {TITLES[setting]}; by hand {1e6 * statistics.median(hand):,.0f} us a step")
    rows = []
    for name, peer in peers.items():
        own = [seconds / TASKS[task] for seconds in peer.seconds[1:]]
        ratios = [seconds / base for seconds, base in zip(own, hand, strict=True)]
        more = 1e6 * statistics.median(seconds - base for seconds, base in zip(own, hand, strict=True))
        rows.append((statistics.median(ratios), min(ratios), max(ratios), more, name))
    for ratio, least, most, more, name in sorted(row for row in rows if row[-1] != "torch"):
        print(f"{NAMES[name][0]:>14}: {ratio:5.2f} times, {more:+7,.0f} us  ({least:.2f} to {most:.2f})", flush=True)


def main() -> int:
    """Print the tables; exit code 1 if a library failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; default: all")
    parser.add_argument("--rounds", type=int, default=9, help="counted windows of each library (default 9)")
    parser.add_argument("--tasks", nargs="*", default=[*TASKS], choices=TASKS, help="networks to train")
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS], choices=SETTINGS, help="work beside the steps")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*NAMES}:
        parser.error(f"NAME={unknown.pop()!r}: must be one of {', '.join(NAMES)}")
    names = [*dict.fromkeys(["torch", "ours", *(arguments.names or NAMES)])]
    failed: dict[str, str] = {}
    versions: dict[str, str] = {}
    print(f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}; one thread")
    for task in arguments.tasks:
        for setting in arguments.settings:
            peers = measure(names, task, setting, arguments.rounds, failed)
            versions |= {name: peer.version for name, peer in peers.items()}
            show(peers, task, setting)
    print("\n" + ", ".join(f"{NAMES[name][1]} {version}" for name, version in versions.items()))
    for name, reason in failed.items():
        print(f"not measured: {NAMES[name][0]}: {reason}")
    return int(bool(failed))


def processor() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


if __name__ == "__main__":
    sys.exit(main())
