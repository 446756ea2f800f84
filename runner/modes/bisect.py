"""`mode=bisect`: finds the first commit that changes the bits of a run or worsens its metric, and the first difference.

The run, or its first batches, is trained at the good commit and then at others, each in a separate git worktree, with
the code of that commit and the run's config. Binary search takes about log2(n) probes for n commits.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from runner.checkpoints.digest import PARTS, read_digests
from runner.config.catalogue import CONF
from runner.config.command_line import key_of
from runner.config.composed import OF_THE_COMMAND
from runner.config.errors import WrongConfig, config_errors
from runner.config.nearest import nearest
from runner.distributed.job import Job
from runner.failures.facts import WrongKey
from runner.files.git import git
from runner.files.names import RESULT
from runner.files.signing import sign
from runner.files.whole import read_object
from runner.modes.kills import Session
from runner.modes.verify import MEANING, Finding, compare
from runner.runs.decision import LEVEL, Samples, decide, smallest_p
from runner.runs.past import given_run
from runner.terminal.answer import give
from runner.terminal.console import print_block


class Commit(NamedTuple):
    """A commit: its hash, and the first line of its message."""

    name: str
    subject: str

    def __str__(self) -> str:
        return f"{self.name[:10]} {self.subject}"


def check_bisect(config: Mapping[str, Any]) -> None:
    """Check the settings of a bisection.

    Raises:
        WrongKey: a key of `bisect` is missing or out of range.
    """
    asked = config["bisect"]
    for key in ("good", "bad"):
        if not asked[key] or asked[key].startswith("-"):
            raise WrongKey(f"bisect.{key}", "must be a commit, such as a hash, a tag or HEAD~8", repr(asked[key]))
    for key in ("batches", "seeds", "patience"):
        if asked[key] < 1:
            raise WrongKey(f"bisect.{key}", "must be a whole number of at least 1", repr(asked[key]))
    if asked["by"] == "metric" and smallest_p(asked["seeds"]) > LEVEL:
        raise WrongKey("bisect.seeds", "too few runs per commit to decide; give at least 6", repr(asked["seeds"]))
    if "RANK" in os.environ:
        raise ValueError("mode=bisect: starts its own processes; run it without torchrun")


def bisect(job: Job) -> None:
    """Find the first commit that changes the bits of a run, or worsens its metric, and print it. Rank 0 alone.

    Raises:
        SystemExit: the bad commit is as good as the good one; the exit code is 1.
        WrongConfig: there are no such commits, or the run cannot be trained at the good one.
    """
    asked = job.config["bisect"]
    with config_errors():
        root = Path(_git("rev-parse", "--show-toplevel"))
        commits = [*_commits(asked["good"], asked["bad"])]
    good, *later = commits
    print_block(f"run {given_run(job)}", [("commits", f"{len(later)} from {good.name[:10]} to {later[-1].name[:10]}")])
    with TemporaryDirectory(prefix="runner-bisect-") as scratch:
        probes = Probes(job, root, Path(scratch))
        with config_errors():
            judge = JUDGES[asked["by"]](probes, good)

        def differs(place: int) -> bool | None:
            answer, text = judge(later[place])
            label = {None: "skipped", False: "ok equal", True: "different"}[answer]
            print_block("", [(label, f"{later[place]}{text}")])
            return answer

        first, unknown = find_first(len(later), differs)
        with config_errors():
            if later[first] not in judge.judged and differs(first) is None:
                raise probes.failure("bad", later[first])
        if not judge.judged[later[first]]:
            give(result={"first": None, "batch": None, "parts": [], "or": []})
            give(reason="the bad commit is as good as the good one")
            print_block("", [("ok equal", f"{later[first]} is as good as {good}")])
            raise SystemExit(1)
        before = commits[first - len(unknown)]
        _report(later[first], [later[place] for place in unknown], judge.find_part(later[first], before), asked)


class ByDigests:
    """Finds out whether a commit trains other bits than the good one.

    Raises:
        WrongConfig: the run cannot be trained at the good commit.
    """

    def __init__(self, probes: Probes, good: Commit) -> None:
        self.probes = probes
        self.judged: dict[Commit, bool] = {}
        self._reference = probes.train(good)
        if not self._reference:
            raise probes.failure("good", good)

    def __call__(self, commit: Commit) -> tuple[bool | None, str]:
        """Return whether a commit differs (None if it does not run), and a text about it."""
        finding = compare(self._reference, self.probes.train(commit), PARTS, 0.0)
        if not finding.count:
            return None, ": does not run"
        self.judged[commit] = finding.batch is not None
        return self.judged[commit], ""

    def find_part(self, commit: Commit, before: Commit) -> Finding:
        """Return where a commit diverges from the one before, which trains like the good one if it runs."""
        return compare(self._reference, self.probes.train(commit), PARTS, 0.0)


class ByMetric:
    """Decides whether the metric at a commit is significantly worse than at the good one.

    Raises:
        WrongConfig: the run cannot be trained at the good commit, or has no such metric.
    """

    def __init__(self, probes: Probes, good: Commit) -> None:
        self.probes = probes
        self.judged: dict[Commit, bool] = {}
        found = probes.measure(good)
        if not found:
            raise probes.failure("good", good)
        self._name = probes.asked["metric"] or found[0]["objective_name"]
        if self._name not in found[0]["metrics"]:
            names = [*found[0]["metrics"]]
            raise WrongKey(
                "bisect.metric", "the run has no such metric; " + nearest(self._name, names), repr(self._name)
            )
        self._is_lower_better = self._name in found[0]["lower"]
        self._reference = self._values(found)

    def __call__(self, commit: Commit) -> tuple[bool | None, str]:
        """Return whether a commit is worse (None if it does not run), and a text about it."""
        values = self._values(self.probes.measure(commit))
        if len(values) < len(self._reference):
            return None, ": does not run"
        self.judged[commit], text = is_worse(self._reference, values, self._is_lower_better)
        return self.judged[commit], f": {self._name} {text}"

    def find_part(self, commit: Commit, before: Commit) -> Finding:
        """Return where the first batches of a commit diverge from those of the one before."""
        return compare(self.probes.train(before), self.probes.train(commit), PARTS, 0.0)

    def _values(self, found: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float(one["metrics"][self._name]) for one in found if self._name in one["metrics"]]


def is_worse(before: Sequence[float], now: Sequence[float], is_lower_better: bool) -> tuple[bool, str]:
    """Return whether values are significantly worse than others with the same seeds, and a text about them.

    Values that are not finite are worse than any that are.
    """
    if diverged := sum(not math.isfinite(one) for one in now):
        return all(map(math.isfinite, before)), f"is not finite with {diverged} of {len(now)} seeds"
    (decision,) = decide([Samples(before, now, [*map(str, range(len(now)))])])
    worse = decision.is_decided and (decision.difference > 0) == is_lower_better
    return worse, f"{decision.means[0]:.4g} -> {decision.means[1]:.4g}, p = {decision.p:.2g}"


JUDGES = {"digests": ByDigests, "metric": ByMetric}


def find_first(count: int, differs: Callable[[int], bool | None]) -> tuple[int, list[int]]:
    """Return the first commit that differs from the good one, and skipped ones before it that may differ too.

    Args:
        count: number of places; what is before the first one does not differ, and the last one is taken to differ.
        differs: whether a place differs; None if unknown.
    """
    low = -1
    high = count - 1
    unknown: set[int] = set()
    while candidates := [place for place in range(low + 1, high) if place not in unknown]:
        middle = min(candidates, key=lambda place: abs(2 * place - low - high))
        answer = differs(middle)
        if answer is None:
            unknown.add(middle)
        elif answer:
            high = middle
        else:
            low = middle
    return high, [*range(low + 1, high)]


class Probes:
    """Trains a run, or its first batches, at commits."""

    def __init__(self, job: Job, root: Path, scratch: Path) -> None:
        self.asked = job.config["bisect"]
        self._root = root
        self._scratch = scratch
        self._config = {key: one for key, one in job.config.items() if key not in OF_THE_COMMAND}
        self._overrides = [one for one in job.overrides if key_of(one).partition(".")[0] not in OF_THE_COMMAND]
        self._lines: dict[Commit, list[dict[str, Any]]] = {}

    def train(self, commit: Commit) -> list[dict[str, Any]]:
        """Return the digests of the first batches at a commit; none if it does not run."""
        if commit not in self._lines:
            run = self._scratch / f"run-{commit.name}"
            with self._worktree(commit) as tree:
                self._run(commit, tree, run, "1ba", (), self.asked["batches"])
            with suppress(FileNotFoundError):
                self._lines[commit] = [one for one in read_digests(run) if one["batch"] <= self.asked["batches"]]
        return self._lines.get(commit, [])

    def measure(self, commit: Commit) -> list[dict[str, Any]]:
        """Return the results of full runs at a commit, one per seed; empty if one of them fails to run."""
        found = []
        with self._worktree(commit) as tree:
            for seed in range(self.asked["seeds"]):
                run = self._scratch / f"run-{commit.name}-{seed}"
                self._run(commit, tree, run, "100ba", (f"seed={seed}",), math.inf)
                result = read_object(run / RESULT)
                if result.get("status") not in ("FINISHED", "DIVERGED"):
                    return []
                found.append(result)
        return found

    def failure(self, key: str, commit: Commit) -> WrongConfig:
        """Return an error that says that a commit does not run, with the end of what it printed."""
        log = "\n".join(self._log(commit).read_text(errors="replace").splitlines()[-8:])
        return WrongConfig(f"bisect.{key}={self.asked[key]!r}: the run cannot be trained there:\n{log}")

    def _run(self, commit: Commit, tree: Path, run: Path, interval: str, typed: Sequence[str], batches: float) -> None:
        """Train the run with the code of a worktree to a batch, or to its end; what it prints is in the log."""
        record = self._scratch / "experiment"
        record.mkdir(exist_ok=True)
        shipped = yaml.safe_load((CONF / "callbacks" / "state_digest.yaml").read_text())
        callbacks = {"state_digest": {**shipped["state_digest"], "interval": interval}}
        parts = ({**self._config, "callbacks": callbacks}, self._overrides)
        contents = [yaml.safe_dump(one, sort_keys=False).encode() for one in parts]
        for name, content in zip(("config.yaml", "overrides.yaml"), contents, strict=True):
            (record / name).write_bytes(content)
        (record / "signature").write_text(sign(contents) or "")
        paths = [*(self._moved(Path(path or os.getcwd()), tree) for path in [os.getcwd(), *sys.path])]
        arguments = [f"rerun={record}", f"hydra.run.dir={run}", "allow_divergence=true", *typed]
        log = self._log(commit)
        patience = self.asked["patience"]
        with Session(arguments, run, log, patience, paths) as session, suppress(TimeoutError):
            any(batch >= batches for batch in session.progress(pause=0.02))

    def _log(self, commit: Commit) -> Path:
        return self._scratch / f"{commit.name}.log"

    def _moved(self, path: Path, tree: Path) -> Path:
        """Return the path of a folder of the repository in a worktree; any other folder's path stays the same."""
        inside = path.absolute()
        is_code = inside.is_relative_to(self._root) and "site-packages" not in inside.parts
        return tree / inside.relative_to(self._root) if is_code else inside

    @contextmanager
    def _worktree(self, commit: Commit) -> Iterator[Path]:
        tree = self._scratch / commit.name
        _git("worktree", "add", "--detach", "--quiet", str(tree), commit.name)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _commits(good: str, bad: str) -> Iterator[Commit]:
    """Yield the good commit and those after it up to the bad one, oldest first."""
    names = {}
    for key, given in (("good", good), ("bad", bad)):
        try:
            names[key] = _git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
        except ValueError:
            raise WrongKey(f"bisect.{key}", "no such commit in this repository", repr(given)) from None
    between = _git("rev-list", "--reverse", "--ancestry-path", f"{names['good']}..{names['bad']}").split()
    if not between:
        raise WrongKey("bisect.good", f"is not an ancestor of bisect.bad={bad}; swap them", repr(good))
    for name in (names["good"], *between):
        yield Commit(name, _git("log", "-1", "--format=%s", name))


def _git(*arguments: str) -> str:
    """Return what git prints.

    Raises:
        ValueError: git fails, for example outside of a repository.
    """
    try:
        return git(*arguments, patience=None).decode(errors="replace").strip()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = os.fsdecode(getattr(error, "stderr", b"") or str(error)).strip()
        raise ValueError(f"mode=bisect: git {arguments[0]} failed: {reason}") from error


def _report(commit: Commit, unknown: Sequence[Commit], found: Finding, asked: Mapping[str, Any]) -> None:
    result = {"first": commit.name, "subject": commit.subject, "batch": found.batch, "parts": [*found.parts]}
    give(result={**result, "or": [one.name for one in unknown]})
    rows = [("first", str(commit))]
    if unknown:
        rows.append(("or", f"one of {len(unknown)} before it that do not run: {', '.join(map(str, unknown))}"))
    if found.batch is None:
        rows.append(("equal", f"bit for bit in its first {asked['batches']} batches: it changes later ones"))
    else:
        rows.append(("different", f"at batch {found.batch}, in {', '.join(found.parts)}"))
        rows.append(("", f"{found.parts[0]}: {MEANING[found.parts[0]]}"))
    print_block("", rows)
