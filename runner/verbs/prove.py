"""`runner prove`: kills and resumes an experiment repeatedly, and compares it bit for bit with an uninterrupted run.

The experiment is trained for some batches in separate processes: once without interruption, and once with a SIGKILL
at random moments and `runner resume` after each. Digests of weights, optimizer, randomness, algorithms and samples
after every batch must be equal, and so must the final metrics. If not, the uninterrupted run is repeated: if the two
uninterrupted runs differ too, the experiment is not deterministic, and resuming is not at fault.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from runner.checkpoints.digest import read_digests
from runner.cli.catalogue import CONF
from runner.cli.command import Command
from runner.cli.nearest import nearest
from runner.config.experiment import Experiment
from runner.failures.errors import SessionFailed, WrongConfig, WrongKey
from runner.files.addresses import hidden_everywhere
from runner.files.whole import write_atomically
from runner.records.job import Job
from runner.records.record import Record
from runner.records.result import read_result
from runner.records.write import describe_origin, write_record
from runner.terminal.answer import set_fields
from runner.terminal.commands import quoted
from runner.terminal.console import print_block, show_path
from runner.trials.kills import IN_SAVE, CompletedKill, RunPace, TrainingProcess, plan_kills
from runner.verbs.compare import difference

FILE = "prove.json"
"""Name of the file with the verdict."""

WHOLE = "uninterrupted"
KILLED = "killed"
AGAIN = "uninterrupted-again"

SHOWN_LINES = 20
"""Lines to show of a failed session's output."""


@dataclass(frozen=True)
class Verdict:
    """The result of a proof.

    Attributes:
        outcome: 'equal'; 'different'; 'not deterministic', if two runs without a kill differ; 'not trained' or 'not
            resumed', if a session failed; 'not killed', if the run ended before the first kill.
        reason: explanation in one sentence.
    """

    outcome: str
    reason: str

    @property
    def is_good(self) -> bool:
        """Whether the experiment resumes bit for bit."""
        return self.outcome == "equal"


def check(command: Command, experiment: Experiment) -> None:
    """Check the options of a proof, and that it can start its own processes."""
    options = command.options
    if "RANK" in os.environ:
        raise ValueError("prove: starts its own processes; use launch.nproc_per_node=... without torchrun")
    for key, least in (("batches", 2), ("kills", 1), ("seed", 0), ("patience", 1)):
        if options[key] < least:
            raise WrongKey(f"--{key}", f"must be a whole number of at least {least}", repr(options[key]))
    known = {*experiment.callbacks, *(path.stem for path in (CONF / "callbacks").glob("*.yaml"))}
    for name in options["without"]:
        if name not in known:
            reason = "no such callback; " + nearest(str(name), known).with_facts(meant="")
            raise WrongKey("--without", reason, repr(",".join(options["without"])))


def run(job: Job) -> None:
    """Prove that an experiment resumes bit for bit, and print the verdict. Rank 0 alone.

    Raises:
        SystemExit: it does not; all files are kept, and the exit code is 1.
        WrongConfig: the experiment cannot be trained at all.
    """
    if any(Path(job.run_dir).iterdir()):
        raise WrongConfig(f"{job.run_dir!r}: is not empty; prove needs an empty folder", at="hydra.run.dir")
    proof = Proof(job)
    print_block(job.title, [_row("folder", show_path(proof.folder))])
    try:
        verdict = proof.run()
    except (KeyboardInterrupt, WrongConfig):
        proof.remove()
        raise
    set_fields(result={"proven": verdict.is_good, "outcome": verdict.outcome, "reason": verdict.reason})
    if not verdict.is_good:
        set_fields(reason=f"{verdict.outcome}: {verdict.reason}")
        proof.write(verdict)
        print_block("", [_row(verdict.outcome, verdict.reason), _row("folder", f"kept: {show_path(proof.folder)}")])
        raise SystemExit(1)
    print_block("", [_row("ok proof", verdict.reason), *(_row("warning", warning) for warning in proof.warnings())])
    if proof.asked["keep"]:
        proof.write(verdict)
    else:
        proof.remove()


class Proof:
    """The runs of a proof in one folder: the experiment's record, and a folder and a log for each run.

    Args:
        job: the job to prove; its experiment is trained as `to_prove` changes it.
    """

    def __init__(self, job: Job) -> None:
        self.folder = Path(job.run_dir)
        self.asked = job.command.options
        self._command = job.command
        self.kills: list[CompletedKill] = []
        self._ranks = job.experiment.launch.processes()
        self._deterministic = bool(job.experiment.trainer.get("deterministic"))
        proved = to_prove(job.experiment, self.asked)
        origin = describe_origin(Command.of("train"), job.run_name)
        write_record(self.folder / "experiment", proved.plain, job.arguments, origin)

    def run(self) -> Verdict:
        """Train, kill, resume and compare; print the progress and return the verdict."""
        try:
            pace = self._train(WHOLE)
        except (SessionFailed, TimeoutError) as error:
            return Verdict("not trained", f"without a kill, {error}")
        if not pace.batches:
            return Verdict("not trained", "no batch was trained")
        _print_row(WHOLE, f"{_count(pace.batches, 'batch', 'batches')} in {pace.seconds:.1f} s")
        try:
            self._train_killed(pace)
        except (SessionFailed, TimeoutError) as error:
            return Verdict("not resumed", f"after kill {len(self.kills)}, {error}")
        if not self.kills:
            return Verdict("not killed", "it ended before the first kill: train more with --batches")
        return self._compare()

    def warnings(self) -> Iterator[str]:
        """Yield caveats of a good verdict, as sentences."""
        digests = read_digests(self.folder / WHOLE)
        if digests[-1]["epoch"] == 0:
            yield f"no epoch ended before the last of {len(digests)} batches: train more with --batches"
        if all(kill.moment != IN_SAVE for kill in self.kills):
            yield "no kill came during a save: try another --seed, or more --kills"
        if not any(kill.resumed_from for kill in self.kills):
            yield "no kill came after the first checkpoint: save earlier with --save-interval"
        elif all(self._ends_epoch(digests, kill.resumed_from) for kill in self.kills):
            yield "no run resumed within an epoch: give a --save-interval that does not divide it"
        if len(self.kills) < self.asked["kills"]:
            yield "the run ended before the last kill: train more with --batches"

    def write(self, verdict: Verdict) -> None:
        """Write the verdict to a file, with everything needed to reproduce it."""
        command = shlex.join(["python", "-m", "runner", *self._command.arguments])
        kills = [asdict(kill) for kill in self.kills]
        content = {**asdict(verdict), "kills": kills, "options": dict(self.asked), "command": command}
        write_atomically(self.folder / FILE, json.dumps(hidden_everywhere(content), indent=1))

    @staticmethod
    def _ends_epoch(digests: Sequence[Mapping[str, Any]], batch: int) -> bool:
        """Return whether a batch, counted from 1, is the last of its epoch; 0 is the beginning of the run."""
        return batch in (0, len(digests)) or digests[batch - 1]["epoch"] != digests[batch]["epoch"]

    def remove(self) -> None:
        """Remove all files of the proof."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _train(self, name: str) -> RunPace:
        """Train a run from its latest checkpoint to its end, and return its pace."""
        with self._session(name) as session:
            pace = session.finish()
        self._check_end(session, name)
        return pace

    def _train_killed(self, pace: RunPace) -> None:
        """Train a run that is killed and resumed until no kills are left or it has ended."""
        run = self.folder / KILLED
        resumed_from = 0
        for number, kill in enumerate(plan_kills(self.asked["kills"], self.asked["seed"], pace, self._ranks), 1):
            with self._session(KILLED) as session:
                completed = session.kill_at(kill, pace, resumed_from)
            if completed is None:
                self._check_end(session, KILLED)
                return
            resumed_from = _last_saved(run)
            self.kills.append(replace(completed, resumed_from=resumed_from))
            rank = f" on rank {completed.rank}" if self._ranks > 1 else ""
            onward = f"resumes after batch {resumed_from}" if resumed_from else "starts over"
            _print_row(f"kill {number}", f"{completed.moment}{rank}, after batch {completed.batch}; {onward}")
        self._train(KILLED)

    def _compare(self) -> Verdict:
        comparison = difference(self.folder / WHOLE, self.folder / KILLED)
        if comparison.is_none:
            result = read_result(self.folder / WHOLE)
            counts = (
                _count(comparison.agreed, "batch", "batches"),
                _count(len(result.metrics) if result else 0, "final metric", "final metrics"),
                _count(len(self.kills), "kill", "kills"),
            )
            return Verdict("equal", f"equal bit for bit: {', '.join(counts)}")
        _print_row("they differ", "training without a kill once more")
        try:
            self._train(AGAIN)
            other = difference(self.folder / WHOLE, self.folder / AGAIN)
        except (SessionFailed, TimeoutError) as error:
            return Verdict("not deterministic", f"without a kill this time, {error}")
        if not other.is_none:
            return Verdict("not deterministic", f"two uninterrupted runs differ: {other}")
        batch = comparison.batch or sys.maxsize
        number, kill = [row for row in enumerate(self.kills, 1) if row[1].resumed_from < batch][-1]
        reason = f"{comparison}; the resume before that was from batch {kill.resumed_from}, after kill {number}"
        if self._ranks > 2 and not self._deterministic:
            reason += ". Three or more ranks need trainer.deterministic=true"
        return Verdict("different", reason)

    def _session(self, name: str) -> TrainingProcess:
        """Start a run, or resume it if it has started."""
        run = self.folder / name
        verb, source = ("resume", run) if Record(run).exists else ("rerun", self.folder / "experiment")
        arguments = [verb, str(source), f"hydra.run.dir={quoted(str(run))}"]
        arguments += [f"--allow-targets={','.join(self.asked['allow_targets'])}"]
        arguments += ["--allow-divergence"]  # diverged runs can be equal too
        arguments += ["--allow-addresses=*"]  # it is this user's own experiment, whether it is signed or not
        return TrainingProcess(arguments, run, self._log(name), self.asked["patience"])

    def _check_end(self, session: TrainingProcess, name: str) -> None:
        """Check that a session ended without an error.

        Raises:
            SessionFailed: it ended with an error.
            WrongConfig: the config of the experiment is wrong, so that not even its first session could begin.
        """
        code = session.process.returncode
        log = self._log(name)
        printed = log.read_text().rpartition("\n$ ")[2]
        tail = "\n".join(printed.splitlines()[-SHOWN_LINES:])
        if code == 2 and name == WHOLE:
            raise WrongConfig(f"the experiment is refused:\n{tail}")
        if code:
            raise SessionFailed(f"it ended with exit code {code}; see {show_path(log)}, which ends in\n{tail}")

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def to_prove(experiment: Experiment, options: Mapping[str, Any]) -> Experiment:
    """Return the experiment to train: shorter, with digests and checkpoints, without callbacks that only display."""
    callbacks = {key: section.plain for key, section in experiment.callbacks.items() if key not in options["without"]}
    for key, changes in (
        ("checkpoint_saver", {"save_interval": options["save_interval"], "mirror": None}),
        ("state_digest", {"interval": "1ba"}),
    ):
        shipped = yaml.safe_load((CONF / "callbacks" / f"{key}.yaml").read_text())[key]
        callbacks[key] = {**shipped, **callbacks.get(key, {}), **changes}
    return experiment.changed(budget=None, callbacks=callbacks).with_trainer(max_duration=f"{options['batches']}ba")


def _last_saved(run_dir: Path) -> int:
    """Return the batch of a run's newest checkpoint; 0 without a checkpoint."""
    from runner.checkpoints.files import find_checkpoint
    from runner.checkpoints.manifest import read_manifest

    try:
        return read_manifest(find_checkpoint(run_dir)).timestamp.batch
    except FileNotFoundError:
        return 0


def _print_row(label: str, text: str) -> None:
    print_block("", [_row(label, text)])


def _row(label: str, text: str) -> tuple[str, str]:
    """Return a label, padded to align rows that are printed one by one, and a text."""
    return f"{label:<17}", text


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"
