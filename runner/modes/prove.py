"""`mode=prove`: whether an experiment that is killed again and again ends as the one that nobody killed, to the bit.

It is trained for some batches in processes of its own: once without interruption, once with a SIGKILL at random moments
and `resume=` after each. Digests of weights, optimizer, randomness, algorithms and samples after every batch are
compared, and the final metrics. Where they part, the first run is made once more: two runs that nobody killed and that
part say that it is not resuming that is at fault.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from runner.checkpoints.digest import read_digests
from runner.config import build
from runner.config.errors import CONF, WrongConfig
from runner.config.signatures import nearest
from runner.distributed.job import Job
from runner.files.whole import write_whole
from runner.modes.check import title_of
from runner.modes.compare import difference
from runner.modes.kills import IN_SAVE, Pace, Session, Struck, plan_kills
from runner.runs.record import write_record
from runner.runs.result import read_result
from runner.terminal import print_block, show_path

FILE = "prove.json"
WHOLE, KILLED, AGAIN = "uninterrupted", "killed", "uninterrupted-again"
SHOWN = 20  # lines of what a session printed, where it failed


class Failed(Exception):
    """A session ended by itself, and not as it should."""


@dataclass(frozen=True)
class Verdict:
    """What a proof came to.

    Attributes:
        outcome: 'equal'; 'parted'; 'not deterministic', of two runs that nobody killed; 'not trained' or 'not resumed',
            where one failed; 'not killed', where no kill came in time.
        reason: a sentence.
    """

    outcome: str
    reason: str

    @property
    def is_good(self) -> bool:
        """Whether the experiment resumes to the bit."""
        return self.outcome == "equal"


def check_provable(config: Mapping[str, Any]) -> None:
    """Raise an error if an experiment cannot be proved as the config asks.

    Raises:
        ValueError: a key of `prove` is out of range, `resume` is set, or torchrun has started this process.
    """
    asked = config["prove"]
    if "RANK" in os.environ:
        raise ValueError("mode=prove: starts processes of its own; use launch.nproc_per_node=... without torchrun")
    if config["resume"] is not None:
        raise ValueError(f"resume={config['resume']!r}: mode=prove trains from the start; give rerun=<the run> instead")
    for key, least in (("batches", 2), ("kills", 1), ("seed", 0), ("patience", 1)):
        if asked[key] < least:
            raise ValueError(f"prove.{key}={asked[key]!r}: must be a whole number of at least {least}")
    known = {*(config["callbacks"] or {}), *(path.stem for path in (CONF / "callbacks").glob("*.yaml"))}
    for name in asked["without"]:
        if name not in known:
            raise ValueError(
                f"prove.without={asked['without']!r}: no such callback; {nearest(str(name), sorted(known))}"
            )


def prove(job: Job) -> None:
    """Prove an experiment and print the verdict. Rank 0 alone; each run has processes of its own.

    Raises:
        SystemExit: with code 1, the verdict is bad; all that was made is kept.
        WrongConfig: the experiment cannot be trained at all.
    """
    if any(Path(job.run_dir).iterdir()):
        raise WrongConfig(f"{job.run_dir!r}: holds something; mode=prove needs a folder for itself")
    proof = Proof(job)
    print_block(title_of(job), [_row("folder", show_path(proof.folder))])
    try:
        verdict = proof.run()
    except (KeyboardInterrupt, WrongConfig):
        proof.remove()
        raise
    if not verdict.is_good:
        proof.write(verdict)
        print_block("", [_row(verdict.outcome, verdict.reason), _row("folder", f"kept: {show_path(proof.folder)}")])
        raise SystemExit(1)
    print_block("", [_row("ok proof", verdict.reason), *(_row("warning", doubt) for doubt in proof.doubts())])
    if proof.asked["keep"]:
        proof.write(verdict)
    else:
        proof.remove()


class Proof:
    """The runs of a proof, in one folder: the experiment's record, and for each run a folder and what it printed.

    Args:
        job: whose config is trained, changed by `to_prove`.
    """

    def __init__(self, job: Job) -> None:
        self.folder = Path(job.run_dir)
        self.asked = job.config["prove"]
        self.struck: list[Struck] = []
        self._ranks = build.make_launch(job.config).processes()
        self._deterministic = bool(job.config["trainer"].get("deterministic"))
        allowed = job.config["allow_targets"]
        self._allowed = [allowed] if isinstance(allowed, str) else allowed
        write_record(self.folder / "experiment", to_prove(job.config), job.arguments, job.run_name)

    def run(self) -> Verdict:
        """Train, kill, resume and compare, and tell how it comes on.

        Raises:
            WrongConfig: the experiment cannot be trained at all.
        """
        try:
            pace = self._train(WHOLE)
        except (Failed, TimeoutError) as error:
            return Verdict("not trained", f"nobody killed it, and {error}")
        if not pace.batches:
            return Verdict("not trained", "no batch was trained")
        _tell(WHOLE, f"{_count(pace.batches, 'batch', 'batches')} in {pace.seconds:.1f} s")
        try:
            self._train_killed(pace)
        except (Failed, TimeoutError) as error:
            return Verdict("not resumed", f"after kill {len(self.struck)}, {error}")
        if not self.struck:
            return Verdict("not killed", "it had ended before a kill came: give it more batches, prove.batches=...")
        return self._compare()

    def doubts(self) -> Iterator[str]:
        """Yield what a good verdict does not cover."""
        digests = read_digests(self.folder / WHOLE)
        if digests[-1]["epoch"] == 0:
            yield f"no epoch ended before the last of {len(digests)} batches: prove.batches=... for more"
        if all(one.moment != IN_SAVE for one in self.struck):
            yield "no kill came inside a save: prove.seed=... for other moments, prove.kills=... for more"
        if not any(one.resumed_from for one in self.struck):
            yield "no kill came after a first checkpoint: prove.save_interval=... for earlier ones"
        if len(self.struck) < self.asked["kills"]:
            yield "not all kills came: the run had ended before; prove.batches=... for more"

    def write(self, verdict: Verdict) -> None:
        """Write down the verdict, and all that is needed to have it again."""
        command = shlex.join([Path(sys.executable).name, "-m", "runner", *sys.argv[1:]])
        kills = [asdict(one) for one in self.struck]
        content = {**asdict(verdict), "kills": kills, "prove": self.asked, "command": command}
        write_whole(self.folder / FILE, json.dumps(content, indent=1))

    def remove(self) -> None:
        """Remove all that was made."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _train(self, name: str) -> Pace:
        """Train a run from where it stands to its end, and return how it came on."""
        with self._session(name) as session:
            pace = session.finish()
        self._check_end(session, name)
        return pace

    def _train_killed(self, pace: Pace) -> None:
        run = self.folder / KILLED
        resumed_from = 0
        for number, kill in enumerate(plan_kills(self.asked["kills"], self.asked["seed"], pace, self._ranks), 1):
            with self._session(KILLED) as session:
                struck = session.strike(kill, pace, resumed_from)
            if struck is None:
                self._check_end(session, KILLED)
                return
            resumed_from = _last_saved(run)
            self.struck.append(replace(struck, resumed_from=resumed_from))
            whom = f" on rank {struck.rank}" if self._ranks > 1 else ""
            onward = f"goes on after batch {resumed_from}" if resumed_from else "begins again"
            _tell(f"kill {number}", f"{struck.moment}{whom}, after batch {struck.batch}; {onward}")
        self._train(KILLED)

    def _compare(self) -> Verdict:
        found = difference(self.folder / WHOLE, self.folder / KILLED)
        if found.is_none:
            result = read_result(self.folder / WHOLE)
            counts = (
                _count(found.agreed, "batch", "batches"),
                _count(len(result.metrics) if result else 0, "final metric", "final metrics"),
                _count(len(self.struck), "kill", "kills"),
            )
            return Verdict("equal", f"equal to the bit: {', '.join(counts)}")
        _tell("they part", "training without a kill once more")
        try:
            self._train(AGAIN)
            other = difference(self.folder / WHOLE, self.folder / AGAIN)
        except (Failed, TimeoutError) as error:
            return Verdict("not deterministic", f"nobody killed it this time, and {error}")
        if not other.is_none:
            return Verdict("not deterministic", f"two runs that nobody killed differ: {other}")
        batch = found.batch or sys.maxsize
        number, kill = [(n, one) for n, one in enumerate(self.struck, 1) if one.resumed_from < batch][-1]
        reason = f"{found}; it had gone on from batch {kill.resumed_from} before, after kill {number}"
        if self._ranks > 2 and not self._deterministic:
            reason += ". Three ranks and more need trainer.deterministic=true"
        return Verdict("parted", reason)

    def _session(self, name: str) -> Session:
        """Start a run, or go on with it where it has begun."""
        run = self.folder / name
        key, source = ("resume", run) if (run / "config.yaml").exists() else ("rerun", self.folder / "experiment")
        allowed = ",".join(map(_quote, self._allowed))
        arguments = [f"{key}={_quote(source)}", f"hydra.run.dir={_quote(run)}", f"allow_targets=[{allowed}]"]
        arguments.append("allow_divergence=true")  # what is proved is that runs are equal
        arguments.append("allow_addresses=['*']")  # it is this user's own experiment, signed or not
        return Session(arguments, run, self._log(name), self.asked["patience"])

    def _check_end(self, session: Session, name: str) -> None:
        """Raise where a session has not ended as it should.

        Raises:
            Failed: it was a failure.
            WrongConfig: it could not begin, nor could the experiment itself.
        """
        code, log = session.process.returncode, self._log(name)
        printed = log.read_text().rpartition("\n$ ")[2]
        if code == 2 and name == WHOLE:
            raise WrongConfig(printed.rpartition("\nerror: ")[2].strip())
        if code:
            tail = "\n".join(printed.splitlines()[-SHOWN:])
            raise Failed(f"it ended with exit code {code}; see {show_path(log)}, which ends in\n{tail}")

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def to_prove(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that is trained: for some batches, with digests and checkpoints, without what only shows."""
    asked = config["prove"]
    callbacks = {key: one for key, one in (config["callbacks"] or {}).items() if key not in asked["without"]}
    for key, changes in (
        ("checkpoint_saver", {"save_interval": asked["save_interval"]}),
        ("state_digest", {"interval": "1ba"}),
    ):
        shipped = yaml.safe_load((CONF / "callbacks" / f"{key}.yaml").read_text())[key]
        callbacks[key] = {**shipped, **callbacks.get(key, {}), **changes}
    trainer = {**config["trainer"], "max_duration": f"{asked['batches']}ba"}
    return {**config, "mode": "train", "callbacks": callbacks, "trainer": trainer}


def _last_saved(run_dir: Path) -> int:
    """Return the batch of a run's newest checkpoint, 0 without one."""
    from runner.checkpoints.files import MANIFEST, find_checkpoint

    try:
        return json.loads((find_checkpoint(run_dir) / MANIFEST).read_text())["timestamp"]["batch"]
    except FileNotFoundError:
        return 0


def _tell(label: str, text: str) -> None:
    print_block("", [_row(label, text)])


def _row(label: str, text: str) -> tuple[str, str]:
    """Return a row in line with those that are printed before and after it."""
    return f"{label:<17}", text


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _quote(value: Any) -> str:
    """Return a value as Hydra reads it whatever is in it."""
    text = str(value)
    return text if re.fullmatch(r"[\w/.:-]+", text) else "'" + re.sub(r"(['\\])", r"\\\1", text) + "'"
