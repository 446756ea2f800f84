"""One run as rank 0 composed it, in a form that it can send to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.cli.command import Command
from runner.config.experiment import Experiment
from runner.distributed.threads import LEFT_TO_US, Threads
from runner.files.addresses import without_credentials


@dataclass(frozen=True)
class Job:
    """One run to do; it can be sent to other processes as JSON.

    Attributes:
        experiment: what is to be trained.
        run_dir: the run's folder.
        run_name: the run's name.
        command: the command that was typed; `latest` is the folder of that run.
        resume: the checkpoint that training continues from, or the folder that holds it; None: from the start.
        source: the folder of the saved run whose batches are trained again; empty for other verbs.
        overrides: the overrides typed on the command line, or chosen by a sweep for this job.
        tags: further facts about the run for its record, by name.
        threads: CPU threads of each process, see `runner.distributed.threads.Threads`.
        may_be_over: whether training may have ended already, in a process that stopped before it had recorded that.
        arguments: the overrides and options that the record keeps, from which the run can be composed again.
        log: the file that takes what is printed, for a job of a sweep or of Slurm; empty: the terminal.
        is_logged_too: whether what goes to `log` is printed as well.
        code: modules of a saved run that are imported instead of the current ones, by path.
        parent: the experiment of the run that a fork begins from, as that run had it there; None if it is not a fork.
        differences: how the config of a run that is resumed, forked or rerun differs from its recorded config.
        choices: the chosen name of each config group, such as {'model': 'mlp'}; without those whose target was typed.
    """

    experiment: Experiment
    run_dir: str
    run_name: str
    command: Command = field(default_factory=lambda: Command.of("train"))
    resume: str | None = None
    source: str = ""
    overrides: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    threads: Threads = LEFT_TO_US
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
        """Return the job that `dataclasses.asdict` turned into a message, which JSON has without tuples."""

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
        """The run that its command names, as it was typed but without credentials."""
        return without_credentials(str(self.command.run))

    @property
    def title(self) -> str:
        """The overrides of the job, which distinguish the jobs of a sweep."""
        return " ".join(self.overrides) or "the default run"
