"""`mode=compare`: whether two runs are equal to the bit; if not, where and in what they begin to differ, and why.

The runs are compared by the digests that the callback `StateDigest` writes. This needs no torch, so the answer comes at
once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.checkpoints.digest import PARTS, first_difference, read_digests
from runner.config import build
from runner.config.composed import check_keys
from runner.config.errors import config_errors
from runner.distributed.job import Job
from runner.runs.changes import find_changes
from runner.runs.kept_code import read_code
from runner.runs.result import read_result
from runner.terminal import print_block, show_path

ENVIRONMENT = ("ranks", "threads", "gpus", "git_commit", "packages", "python", "platform", "host", "cpus")
"""Facts about where a run was made that may change its numbers, the most likely one first."""


@dataclass(frozen=True)
class Difference:
    """How two runs compare.

    Attributes:
        last: the last batch of each run.
        agreed: the last batch up to which they are equal, 0 if there is none.
        batch: the first batch after which they differ, None if they are equal in all batches that both have.
        parts: what differs after that batch.
        metrics: the final metrics that differ, with both values, if both runs end at the same batch.
    """

    last: tuple[int, int]
    agreed: int
    batch: int | None
    parts: tuple[str, ...]
    metrics: dict[str, tuple[float | None, float | None]]

    @property
    def agree(self) -> bool:
        """Whether the runs are equal up to the last batch that both have."""
        return self.batch is None and not self.metrics

    @property
    def is_none(self) -> bool:
        """Whether the runs are equal and end at the same batch."""
        return self.agree and self.last[0] == self.last[1]

    def __str__(self) -> str:
        if self.batch is not None:
            known = f"equal to the bit up to batch {self.agreed}" if self.agreed else "the first that both have"
            gap = ", with no digests in between" if 0 < self.agreed < self.batch - 1 else ""
            return f"at batch {self.batch}, in {', '.join(self.parts)}; {known}{gap}"
        more = [f"{name} is {a} and {b}" for name, (a, b) in self.metrics.items()]
        if self.last[0] != self.last[1]:
            more.append(f"one ends after batch {self.last[0]}, the other after {self.last[1]}")
        return "; ".join([f"equal to the bit up to batch {self.agreed}", *more])


def difference(a: Path, b: Path) -> Difference:
    """Return how the runs in two folders compare.

    Args:
        a: the folder of one run.
        b: the folder of the other run.

    Raises:
        ValueError: there is no batch after which both runs have a digest.
        FileNotFoundError: a run has no digests.
    """
    last = tuple(max((one["batch"] for one in read_digests(run)), default=0) for run in (a, b))
    found = first_difference(a, b)
    results = [read_result(run) for run in (a, b)]
    metrics: dict[str, tuple[float | None, float | None]] = {}
    if last[0] == last[1] and all(one is not None and one.status in ("FINISHED", "DIVERGED") for one in results):
        first, second = (one.metrics for one in results if one is not None)
        names = dict.fromkeys((*first, *second))
        pairs = {name: (first.get(name), second.get(name)) for name in names}
        # Compared as text, so that NaN equals NaN.
        metrics = {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}
    return Difference((last[0], last[1]), found.agreed, found.batch, found.parts, metrics)


def compare(job: Job) -> None:
    """Print how two runs compare, and how their records differ. Rank 0 alone.

    Raises:
        SystemExit: the runs differ; the exit code is 1.
        WrongConfig: one of the runs does not exist, or they have no digests that could be compared.
    """
    with config_errors():
        check_keys(job.config)
        a, b = (_folder_of(str(one), job.config) for one in _read_pair(job.config["compare"]))
        found = difference(a, b)
    rows = [("ok equal" if found.agree else "different", str(found))]
    if found.batch is not None and "samples" not in found.parts and first_difference(a, b, ["samples"]).batch is None:
        rows.append(("samples", "the same in all batches"))
    print_block(f"{show_path(a)} -> {show_path(b)}", [*rows, *_differences_of_records(a, b)])
    if not found.agree:
        raise SystemExit(1)


def _differences_of_records(a: Path, b: Path) -> Iterator[tuple[str, str]]:
    """Yield the differences between the records of two runs, as labels and texts; nothing if one has no record."""
    before, after = (_read(run / "config.yaml") for run in (a, b))
    if before and after:
        for change in find_changes(before, after):
            yield "config", str(change)
    before, after = (_read(run / "environment.json") for run in (a, b))
    if before and after:
        before, after = ({key: one.get(key) for key in ENVIRONMENT} for one in (before, after))
        for change in find_changes(before, after):
            yield "environment", str(change)
        patches = [(run / "git.patch").read_bytes() if (run / "git.patch").exists() else b"" for run in (a, b)]
        if patches[0] != patches[1]:
            yield "environment", "git.patch: uncommitted changes of the code differ"
        if read_code(a) != read_code(b):
            yield "environment", "code/: modules that no commit holds differ"


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file of a record; an empty dict if it cannot be read."""
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_pair(given: Any) -> list[Any]:
    """Return the two runs that the key `compare` names."""
    if not isinstance(given, list) or len(given) != 2:
        raise ValueError(f"compare={given!r}: give two runs, by folder or MLflow id: 'compare=[RUN_A,RUN_B]'")
    return given


def _folder_of(given: str, config: Mapping[str, Any]) -> Path:
    """Return the folder of a run, asking destinations for one that is named by an id.

    Raises:
        ValueError: there is no such run, or it has no digests.
    """
    path = Path(given)
    if not path.exists() and re.fullmatch(r"[0-9a-f]{32}", given):
        found = [run for one in build.make_destinations(config) if (run := one.find_run(given, None)) is not None]
        path = found[0] if found else path
    if not path.exists():
        raise ValueError(f"compare={given!r}: no such folder; give two runs: 'compare=[RUN_A,RUN_B]'")
    try:
        digests = read_digests(path)
    except OSError:
        digests = []
    if not digests:
        raise ValueError(
            f"compare={given!r}: no digests there; a run writes them with +callbacks=state_digest: every 1000 batches "
            "and after the last one, or after each with callbacks.state_digest.interval=1ba. "
            f"{', '.join(PARTS)} are compared"
        )
    return path.absolute()
