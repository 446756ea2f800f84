"""Writes MLPerf's files: the log of a result, and the description of the system that produced it."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runner
from runner.callbacks._disk import disk_errors_reported
from runner.failures.checks import check_inner_path, refuse_if
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from runner import State

log = logging.getLogger("runner")
ROOT = Path(runner.__file__).parents[1]

# Names of a system's status, in results and in system descriptions.
STATUSES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}

# Required fields of a system description that only a person can fill in.
UNKNOWN = (
    *("host_processor_caches", "host_processor_interconnect", "host_storage_type", "host_storage_capacity"),
    *("host_networking", "host_networking_topology", "host_memory_configuration", "accelerator_host_interconnect"),
    *("accelerator_frequency", "accelerator_on-chip_memories", "accelerator_memory_configuration"),
    *("accelerator_interconnect", "accelerator_interconnect_topology", "cooling", "hw_notes", "sw_notes"),
)


def check_names(root_folder: str, submitter: str, system_name: str | None, cache_clear_cmd: str | None) -> None:
    """Check that the names are usable in paths, and that the command is not empty."""
    check_inner_path("root_folder", root_folder, "mlperf")
    refuse_if(not submitter, "submitter", submitter, "must be a name")
    if system_name is not None and not re.fullmatch(r"[\w.+-]+", system_name):
        raise wrong_argument("system_name", system_name, "must be a file name of letters, digits and . + - _")
    if cache_clear_cmd is not None and not cache_clear_cmd.strip():
        raise wrong_argument("cache_clear_cmd", cache_clear_cmd, "must be a command, or None to clear nothing")


def run_command(name: str, command: str) -> None:
    """Run a command without a shell, and wait until it ends."""
    try:
        process = subprocess.run(shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except (OSError, ValueError) as error:
        raise wrong_argument(name, command, f"cannot be run ({error})") from None
    if process.returncode:
        last_line = (process.stderr or process.stdout).strip().rpartition("\n")[2]
        raise wrong_argument(name, command, f"failed with {process.returncode}: {last_line}")


class MlperfLog(logging.Handler):
    """Collects the `:::MLLOG` lines of a run, and writes them to a file once one is open.

    Intervals nest. The outermost are 'init' and then 'run'; nothing is added after 'run'.
    """

    def __init__(self) -> None:
        from mlperf_logging.mllog.mllog import MLLogger

        super().__init__()
        self.lines: list[str] = []
        self._open: list[tuple[str, dict[str, Any]]] = []  # names and metadata of open intervals, innermost last
        self._owner = ""
        self._path: Path | None = None
        self._has_valid_accuracy = self._has_warned = False
        channel = logging.Logger("mlperf", logging.INFO)  # not from getLogger(), so no other settings affect it
        channel.addHandler(self)
        self._mllog = MLLogger(channel, root_dir=str(ROOT), default_stack_offset=2)

    def is_in(self, name: str) -> bool:
        """Return whether an interval is open."""
        return any(name == open_name for open_name, _ in self._open)

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Add an event at the current time."""
        self._mllog.event(key, value, metadata)

    def start(self, name: str, **metadata: Any) -> None:
        """Add the start of an interval inside the open ones."""
        self._open.append((name, metadata))
        self._mllog.start(f"{name}_start", None, metadata)

    def end(self, name: str, **more: Any) -> None:
        """End an interval after those inside it. Do nothing if it is not open."""
        while self.is_in(name):
            inner, metadata = self._open.pop()
            self._mllog.end(f"{inner}_stop", None, {**metadata, **(more if inner == name else {})})

    def add_accuracy(self, value: float, name: str, **metadata: Any) -> None:
        """Add the accuracy of an evaluation, and warn if the compliance checker would refuse the result."""
        self._mllog.event("eval_accuracy", value, metadata)
        self._has_valid_accuracy |= value < 1.0
        if not self._has_valid_accuracy:
            self.warn_of_refusal(f"{name} is {value:.4g}")

    def warn_of_refusal(self, reason: str) -> None:
        """Warn once, on rank 0, why the compliance checker may refuse the result."""
        if self._path is not None and not self._has_warned:
            text = "%s: %s; the compliance checker refuses a result without an eval_accuracy below 1.0"
            log.warning(text, self._owner, reason)
            self._has_warned = True

    def open(self, path: Path, owner: str) -> None:
        """Write the lines so far to a file, replacing its content, and append later lines as they come.

        Raises:
            OSError: the file cannot be written. If that happens to a later line, there is only one warning.
        """
        self._owner = owner
        self._path = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in self.lines))
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line. MLPerf's library calls this."""
        self.lines.append(record.getMessage())
        path = self._path
        self._path = None  # a failed write is the last attempt
        if path is not None:
            with disk_errors_reported(self._owner):
                with path.open("a") as file:
                    file.write(f"{self.lines[-1]}\n")
                self._path = path  # only now, because closing the file writes to the disk

    def state_dict(self) -> dict[str, Any]:
        """Return the lines and the open intervals, from which a resumed run continues the result."""
        return {"lines": [*self.lines], "open": [[name, dict(metadata)] for name, metadata in self._open]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the lines and the open intervals. An open file is not changed."""
        self.lines = [*state["lines"]]
        self._open = [(name, metadata) for name, metadata in state["open"]]
        events = (json.loads(line.partition(" ")[2]) for line in self.lines)
        self._has_valid_accuracy = any(event["key"] == "eval_accuracy" and event["value"] < 1.0 for event in events)


def describe_system(state: State) -> dict[str, str]:
    """Return a description of the system, assuming that all machines are like this rank's. Unknown fields are ''."""
    import psutil
    import torch

    from runner import get_world_size

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
    processors = _read_processors()
    frequency = psutil.cpu_freq()
    sockets = {processor["physical id"] for processor in processors if "physical id" in processor}
    description = {
        "number_of_nodes": str(get_world_size() // ranks),
        "host_processors_per_node": str(max(1, len(sockets))),
        "host_processor_model_name": processors[0].get("model name", platform.machine()) if processors else "",
        "host_processor_core_count": str(psutil.cpu_count(logical=False) or ""),
        "host_processor_vcpu_count": str(psutil.cpu_count() or ""),
        "host_processor_frequency": f"{frequency.max or frequency.current:.0f} MHz" if frequency else "",
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerators_per_node": "0",
        "accelerator_model_name": "",
        "accelerator_memory_capacity": "",
        "framework": f"PyTorch {torch.__version__}",
        "other_software_stack": f"Python {platform.python_version()}, CUDA {torch.version.cuda}",
        "operating_system": platform.platform(),
    }
    if state.device.type == "cuda":
        device = torch.cuda.get_device_properties(state.device)
        description["accelerators_per_node"] = str(ranks)
        description["accelerator_model_name"] = device.name
        description["accelerator_memory_capacity"] = f"{device.total_memory / 2**30:.0f} GiB"
    return description | dict.fromkeys(UNKNOWN, "")


def name_system(description: dict[str, str]) -> str:
    """Return a file name for a system: its nodes and its accelerators or processors, such as '1x2xNVIDIA_H100'."""
    accelerators = int(description["accelerators_per_node"])
    number = accelerators or description["host_processors_per_node"]
    model = description["accelerator_model_name"] or description["host_processor_model_name"] or "CPU"
    return f"{description['number_of_nodes']}x{number}x" + re.sub(r"[^A-Za-z0-9.]+", "_", model).strip("_")


def describe_data(state: State, label: str) -> dict[str, Any]:
    """Return the seed, and the sizes of batches and data sets over all ranks; None for a size that is not known."""
    (evaluator,) = (evaluator for evaluator in state.evaluators if evaluator.label == label)
    samples, batch_size = _sizes(state.train_dataloader)
    return {
        "seed": state.rank_zero_seed,
        "global_batch_size": batch_size,
        "train_samples": samples,
        "eval_samples": _sizes(evaluator.dataloader)[0],
    }


def _sizes(loader: Any) -> tuple[int | None, int | None]:
    """Return the numbers of samples in a loader and in a batch, over all ranks."""
    from runner import get_world_size

    order = getattr(loader, "order", None)
    if order is not None:
        return order.num_samples, order.batch_size
    batch_size = getattr(loader, "batch_size", None)
    try:
        samples = len(loader.dataset)
    except (AttributeError, TypeError):
        samples = None
    return samples, None if batch_size is None else batch_size * get_world_size()


def _read_processors() -> Sequence[dict[str, str]]:
    """Return what Linux reports about each logical processor, or an empty list on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    blocks = (block for block in text.split("\n\n") if block.strip())
    return [dict(re.findall(r"^(.+?)\s*:\s*(.*)$", block, re.MULTILINE)) for block in blocks]
