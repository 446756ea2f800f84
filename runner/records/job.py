"""A run as rank 0 composed it, in a form that can be sent to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.cli.command import Command
from runner.config.experiment import Experiment
from runner.distributed.threads import DEFAULT_THREADS, Threads
from runner.files.addresses import without_credentials


@dataclass(frozen=True)
class Job:
    """A run to carry out; it can be sent to other processes as JSON.

    Attributes:
        experiment: the experiment to train.
        run_dir: the run's folder.
        run_name: the run's name.
        command: the command that was typed, with `latest` replaced by the folder of that run.
        resume: the checkpoint that training continues from, or the folder that holds it; None: from the start.
        source: the folder of the saved run whose batches are trained again; empty for other verbs.
        overrides: the overrides typed on the command line, or chosen by a sweep for this job.
        tags: further facts about the run for its record, by name.
        threads: CPU threads of each process, see `runner.distributed.threads.Threads`.
        may_be_over: whether training may have ended already, in a process that stopped before recording that.
        arguments: the recorded overrides and options, from which the run can be composed again.
        log: the file that output goes to, for a job of a sweep or of Slurm; empty: the terminal.
        is_logged_too: whether output that goes to `log` is printed as well.
        code: modules of a saved run that are imported instead of the current ones, by path.
        parent: for a fork, the experiment of the parent at the batch where the fork begins; otherwise None.
        differences: how the config of a run that is resumed, forked or rerun differs from its recorded config.
        choices: the chosen name of each config group, such as {'model': 'mlp'}, except if its target was typed.
    """

    experiment: Experiment
    run_dir: str
    run_name: str
    command: Command = field(default_factory=lambda: Command.of("train"))
    resume: str | None = None
    source: str = ""
    overrides: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    threads: Threads = DEFAULT_THREADS
    may_be_over: bool = False
    arguments: list[str] = field(default_factory=list)
    log: str = ""
    is_logged_too: bool = False
    code: dict[str, str] = field(default_factory=dict)
    parent: Experiment | None = None
    differences: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Job:
        """Return the job that `dataclasses.asdict` turned into a message; JSON has turned its tuples into lists."""

        def with_tuples(mapping: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}

        command = with_tuples(message["command"])
        command["options"] = with_tuples(command["options"])
        parent = message["parent"]
        fields = {
            "experiment": Experiment(**message["experiment"]),
            "command": Command(**command),
            "threads": Threads(*message["threads"]),
            "parent": None if parent is None else Experiment(**parent),
        }
        return cls(**{**message, **fields})

    @property
    def typed_run(self) -> str:
        """The run that the command names, as typed, but without credentials."""
        return without_credentials(str(self.command.run))

    @property
    def title(self) -> str:
        """The overrides of the job, which distinguish the jobs of a sweep."""
        return " ".join(self.overrides) or "the default run"
