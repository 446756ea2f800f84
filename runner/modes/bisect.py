"""`mode=bisect`: the first commit that changes the bits of a run, and the first batch and part in which it does.

The first batches of the run are trained at the good commit and then at others, each in a git worktree of its own, with
the code of that commit and the run's config. Binary search takes as many probes as the number of commits has bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from runner.checkpoints.digest import PARTS, read_digests
from runner.config.catalogue import CONF
from runner.config.composed import OF_THE_COMMAND
from runner.config.errors import WrongConfig, config_errors
from runner.distributed.job import Job
from runner.failures.facts import WrongKey
from runner.files.signing import sign
from runner.modes.kills import Session
from runner.modes.verify import MEANING, Finding, compare
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
    """Check what is asked of a bisection.

    Raises:
        WrongKey: a key of `bisect` is missing or out of range.
    """
    asked = config["bisect"]
    for key in ("good", "bad"):
        if not asked[key] or asked[key].startswith("-"):
            raise WrongKey(f"bisect.{key}", "must be a commit, such as a hash, a tag or HEAD~8", repr(asked[key]))
    for key in ("batches", "patience"):
        if asked[key] < 1:
            raise WrongKey(f"bisect.{key}", "must be a whole number of at least 1", repr(asked[key]))
    if "RANK" in os.environ:
        raise ValueError("mode=bisect: starts processes of its own; leave out torchrun")


def bisect(job: Job) -> None:
    """Find the first commit that changes the bits of a run, and print it. Rank 0 alone.

    Raises:
        SystemExit: the bad commit trains the same; the exit code is 1.
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
            reference = probes.train(good)
            if not reference:
                raise WrongConfig(
                    f"bisect.good={asked['good']!r}: the run cannot be trained there:\n{probes.log(good)}"
                )
        found: dict[int, Finding] = {}

        def differs(place: int) -> bool | None:
            lines = probes.train(later[place])
            finding = compare(reference, lines, PARTS, 0.0)
            if not finding.count:
                print_block("", [("skipped", f"{later[place]}: does not run")])
                return None
            found[place] = finding
            label = "ok equal" if finding.batch is None else "different"
            print_block("", [(label, str(later[place]))])
            return finding.batch is not None

        first, unknown = find_first(len(later), differs)
        if first not in found and differs(first) is None:
            raise WrongConfig(
                f"bisect.bad={asked['bad']!r}: the run cannot be trained there:\n{probes.log(later[first])}"
            )
    _report(later, first, unknown, found[first])


def find_first(count: int, differs: Callable[[int], bool | None]) -> tuple[int, list[int]]:
    """Return the first of some places, in order, that differs from what was before, and those before it that may do so.

    Args:
        count: number of places; what is before the first one does not differ, and the last one is taken to differ.
        differs: whether a place differs; None if that cannot be told.
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
    """Trains the first batches of a run at commits.

    Args:
        job: the job, whose config is that of the run.
        root: the top folder of the repository.
        scratch: an empty folder.
    """

    def __init__(self, job: Job, root: Path, scratch: Path) -> None:
        self._asked = job.config["bisect"]
        self._root = root
        self._scratch = scratch
        record = scratch / "experiment"
        record.mkdir()
        shipped = yaml.safe_load((CONF / "callbacks" / "state_digest.yaml").read_text())
        callbacks = {"state_digest": {**shipped["state_digest"], "interval": "1ba"}}
        config = {key: one for key, one in job.config.items() if key not in OF_THE_COMMAND} | {"callbacks": callbacks}
        contents = [yaml.safe_dump(one, sort_keys=False).encode() for one in (config, [])]
        for name, content in zip(("config.yaml", "overrides.yaml"), contents, strict=True):
            (record / name).write_bytes(content)
        (record / "signature").write_text(sign(contents) or "")

    def train(self, commit: Commit) -> list[dict[str, Any]]:
        """Return the digests of the first batches at a commit; none if it does not run."""
        run = self._scratch / f"run-{commit.name}"
        with self._worktree(commit) as tree:
            paths = [*(self._moved(Path(path or os.getcwd()), tree) for path in [os.getcwd(), *sys.path])]
            arguments = [f"rerun={self._scratch / 'experiment'}", f"hydra.run.dir={run}", "allow_divergence=true"]
            with Session(arguments, run, self._log(commit), self._asked["patience"], paths) as session:
                try:
                    any(batch >= self._asked["batches"] for batch in session.progress(pause=0.02))
                except TimeoutError:
                    return []
        try:
            return [one for one in read_digests(run) if one["batch"] <= self._asked["batches"]]
        except FileNotFoundError:
            return []

    def log(self, commit: Commit) -> str:
        """Return the end of what the training at a commit printed."""
        return "\n".join(self._log(commit).read_text(errors="replace").splitlines()[-8:])

    def _log(self, commit: Commit) -> Path:
        return self._scratch / f"{commit.name}.log"

    def _moved(self, path: Path, tree: Path) -> Path:
        """Return a folder of the repository as it is in a worktree; others stay."""
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
        raise WrongKey("bisect.good", f"is no ancestor of bisect.bad={bad}; exchange them", repr(good))
    for name in (names["good"], *between):
        yield Commit(name, _git("log", "-1", "--format=%s", name))


def _git(*arguments: str) -> str:
    """Return what git prints.

    Raises:
        ValueError: git fails, for example outside of a repository.
    """
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        raise ValueError(f"mode=bisect: git {arguments[0]} failed: {reason}") from error
    return done.stdout.strip()


def _about_failure(key: str, asked: Mapping[str, Any], log: str) -> str:
    return f"bisect.{key}={asked[key]!r}: the run cannot be trained there:\n{log}"


def _report(later: list[Commit], first: int, unknown: list[int], found: Finding) -> None:
    commit = later[first]
    result = {"first": commit.name, "subject": commit.subject, "batch": found.batch, "parts": [*found.parts]}
    give(result={**result, "or": [later[place].name for place in unknown]})
    if found.batch is None:
        print_block("", [("ok equal", f"the bad commit too: {commit} changes no bit up to batch {found.agreed}")])
        give(reason="the bad commit trains the same as the good one")
        raise SystemExit(1)
    rows = [("first", str(commit))]
    if unknown:
        rows.append(
            ("or", f"one of {len(unknown)} before it that do not run: {', '.join(str(later[one]) for one in unknown)}")
        )
    rows.append(("different", f"at batch {found.batch}, in {', '.join(found.parts)}"))
    rows.append(("", f"{found.parts[0]}: {MEANING[found.parts[0]]}"))
    print_block("", rows)
