"""`runner compare RUN_A RUN_B`: shows runs side by side, and uses digests to find the first batch where they diverge.

It lists status, time, metrics, and differences in configs and environments. Each run with digests from the callback
`state_digest` is compared with the first such run; the exit code is 1 if they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoints.digest import DIGESTS, differing_tensors, first_difference, read_digests
from runner.comparing.side_by_side import describe_bases, short_names, side_by_side
from runner.config import build
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.files.names import CONFIG, RESULT
from runner.files.printable import printable
from runner.history.saved_run import is_id
from runner.records.folder import require_latest_run
from runner.records.job import Job
from runner.records.load import describe_inequality
from runner.records.patch import first_of
from runner.records.record import OWN_LOOP, Record
from runner.records.result import TIME, read_result
from runner.terminal.answer import set_fields
from runner.terminal.text import heading, in_columns


@dataclass(frozen=True)
class Difference:
    """The differences between two runs.

    Attributes:
        last: the last batch of each run.
        agreed: the last batch up to which they are equal; 0 if they never are.
        batch: the first batch after which they differ; None if they are equal in all batches that both have.
        parts: the parts that differ after that batch.
        metrics: the final metrics that differ, with both values, if both runs end at the same batch.
        tensors: names of the tensors that differ after that batch, by part, if both runs have digests of them.
    """

    last: tuple[int, int]
    agreed: int
    batch: int | None
    parts: tuple[str, ...]
    metrics: dict[str, tuple[float | None, float | None]]
    tensors: dict[str, list[str]] = field(default_factory=dict)

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
            known = "the first batch with digests in both"
            if self.agreed:
                known = f"equal bit for bit up to batch {self.agreed}"
            gap = ", with no digests in between" if 0 < self.agreed < self.batch - 1 else ""
            return f"at batch {self.batch}, in {', '.join(map(self._named, self.parts))}; {known}{gap}"
        more = [f"{name} is {a} and {b}" for name, (a, b) in self.metrics.items()]
        if self.last[0] != self.last[1]:
            more.append(f"one ends after batch {self.last[0]}, the other after {self.last[1]}")
        return "; ".join([f"equal bit for bit up to batch {self.agreed}", *more])

    def _named(self, part: str) -> str:
        """Return a part, with the first of its tensors that differ."""
        names = self.tensors.get(part, [])
        return f"{part} ({first_of(names)})" if names else part


def difference(a: Path, b: Path) -> Difference:
    """Compare the runs in two folders.

    Raises:
        ValueError: no batch has a digest in both runs.
        FileNotFoundError: a run has no digests.
    """
    last = tuple(max((line["batch"] for line in read_digests(run)), default=0) for run in (a, b))
    divergence = first_difference(a, b)
    results = [read_result(run) for run in (a, b)]
    metrics: dict[str, tuple[float | None, float | None]] = {}
    if last[0] == last[1] and all(run is not None and run.status in ("FINISHED", "DIVERGED") for run in results):
        first, second = (run.metrics for run in results if run is not None)
        # A recorded loop may have no evaluation.
        shared = first.keys() & second.keys() if _is_own_loop(a) or _is_own_loop(b) else first.keys() | second.keys()
        names = [name for name in {**first, **second} if name in shared - {TIME}]
        pairs = {name: (first.get(name), second.get(name)) for name in names}
        # Compared as text, so that NaN equals NaN.
        metrics = {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}
    tensors = {} if divergence.batch is None else differing_tensors(a, b, divergence.batch)
    return Difference((last[0], last[1]), *divergence, metrics, tensors)


def run(job: Job) -> None:
    """Print runs side by side. Needs no torch, so it is fast. Rank 0 only.

    Raises:
        SystemExit: digests differ; the exit code is 1.
        WrongConfig: one of the runs does not exist.
    """
    with config_errors():
        folders = [_folder_of(str(word), job.experiment) for word in job.command.words]
    lines = side_by_side(folders)
    results = [result for result in map(read_result, folders) if result is not None]
    for note in (describe_inequality(result.load for result in results), describe_bases(results)):
        lines += [] if note is None else ["", f"note: {note}"]
    rows, agree = _compare_digests(folders)
    set_fields(result={"runs": [_describe(folder) for folder in folders], "digests": dict(rows), "agree": agree})
    print("\n".join([*lines, "", heading("Digests"), *in_columns(rows)]))
    if not agree:
        set_fields(reason="the digests of these runs differ")
        raise SystemExit(1)


def _describe(folder: Path) -> dict[str, Any]:
    """Return a run in its JSON form."""
    result = read_result(folder)
    return {"folder": str(folder)} | ({} if result is None else result.as_json())


def _compare_digests(folders: Sequence[Path]) -> tuple[list[tuple[str, str]], bool]:
    """Compare each run with digests to the first; return a row for each, and whether all are equal."""
    names = [printable(name) for name in short_names(folders)]
    digested = [number for number, folder in enumerate(folders) if _has_digests(folder)]
    if len(digested) < 2:
        writer = "recorder.watch" if any(_is_own_loop(folder) for folder in folders) else "+callbacks=state_digest"
        return [("none to compare", f"{writer} writes them, to find the batch where runs diverge")], True
    rows = []
    agree = True
    first = folders[digested[0]]
    for number in digested[1:]:
        try:
            comparison = difference(first, folders[number])
        except ValueError:
            text = "no batch has digests in both: give both the same callbacks.state_digest.interval"
        else:
            remark = _about_samples(comparison, first, folders[number])
            text = f"{'ok' if comparison.agree else 'different'}: {comparison}{remark}"
            agree &= comparison.agree
        rows.append((f"{names[digested[0]]} -> {names[number]}", printable(text)))
    return rows, agree


def _folder_of(word: str, experiment: Experiment) -> Path:
    """Return the folder of a run; for an id, ask the destinations of an experiment."""
    path = require_latest_run() if word == "latest" else Path(word)
    if not path.exists() and is_id(word):
        answers = (destination.find_run(word, None) for destination in build.make_destinations(experiment.callbacks))
        runs = [run for run in answers if run is not None]
        path = runs[0] if runs else path
    refuse_if(not path.exists(), "RUN", word, "no such folder; runner runs lists those in outputs/")
    if not any((path / name).exists() for name in (RESULT, CONFIG, DIGESTS)):
        raise wrong_argument("RUN", word, f"has no {RESULT}, {CONFIG} or {DIGESTS}, so it is not the folder of a run")
    return path.absolute()


def _about_samples(comparison: Difference, a: Path, b: Path) -> str:
    """Return a remark if two runs diverge although all their samples are the same."""
    if comparison.batch is None or "samples" in comparison.parts:
        return ""
    if not all("samples" in line for run in (a, b) for line in read_digests(run)[:1]):
        return ""
    return "" if first_difference(a, b, ["samples"]).batch is not None else "; samples are the same in all batches"


def _is_own_loop(folder: Path) -> bool:
    return Record(folder).verb == OWN_LOOP


def _has_digests(folder: Path) -> bool:
    try:
        return bool(read_digests(folder))
    except (OSError, ValueError):
        return False
