"""The modes of a command, one row each: what a mode runs, and everything else the program must know about it.

Nothing is imported until a mode runs, so that the modes that need no torch do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from runner.cli.foreign import about_foreign
from runner.cli.nearest import nearest
from runner.failures.exit_codes import UNTESTABLE, WRONG_CONFIG
from runner.failures.facts import WrongKey

if TYPE_CHECKING:
    from runner.distributed.job import Job
    from runner.records.result import Objective


@dataclass(frozen=True)
class Mode:
    """One value of `mode=`.

    Attributes:
        name: name typed after `mode=`. If a mode has its own keys, they are in the config under this name.
        says: a description for lists of modes, in one line.
        example: a command, as it is typed.
        runs: 'module:function' that does a job in this mode. It takes a `Job`, and returns the objective, if any. If a
            mode composes nothing, the function takes the typed values of its own keys, and returns the exit code, or
            None for 0.
        check: 'module:function' that raises if a config cannot be used in this mode; it takes the config.
        keys: the mode's own keys in the config, each with its allowed values or type.
        words: the least and most words that may follow its name, as in `runner init my_project`; None if it is not
            typed like this.
        first_key: its key whose value these words are; empty if they are the value under its name.
        word_keys: the keys whose values these words are, one each, with `run` among them.
        composes: whether it needs a config. If not, it runs before Hydra is imported, and its keys are not in the
            config.
        has_value: whether the config has a single value under its name, instead of keys; the mode checks it itself.
        folder: 'run' is the folder of a run in outputs/, which is kept and recorded; 'work' is a folder there that the
            mode removes itself; 'temporary' is an empty folder outside of the working directory, which is removed.
        on_all_ranks: whether it runs on all ranks of the launch; otherwise only on rank 0.
        trains: whether it trains, and leaves a run that can be resumed.
        resumes: whether it trains the run that `resume=` names further, or shows what that would do.
        uses_weights: whether it uses the weights of a saved run, named by `resume=`, and trains nothing.
        accepts_any_run: whether the run that `resume=` names may be one that trained nothing.
        trains_again: whether it trains batches of the run that `run=` names again: 'then', with the modules that were
            kept with the run, or 'now', with those of today. Its keys may be typed without its name.
        judges: whether its exit code is an answer for `git bisect run`: 0 good, 1 bad, and 125 after a refusal, to skip
            the commit.
        needs_experiment: whether the config must describe an experiment that can be built.
        has_objective: whether it returns an objective, by which the jobs of a sweep are compared.
        can_be_swept: whether it may run as a job of a sweep.
    """

    name: str
    says: str
    example: str
    runs: str
    check: str | None = None
    keys: Mapping[str, type | tuple[str, ...]] = field(default_factory=dict)
    words: tuple[int, int] | None = None
    first_key: str = ""
    word_keys: tuple[str, ...] = ()
    composes: bool = True
    has_value: bool = False
    folder: Literal["run", "work", "temporary"] = "temporary"
    on_all_ranks: bool = False
    trains: bool = False
    resumes: bool = False
    uses_weights: bool = False
    accepts_any_run: bool = False
    trains_again: Literal["", "then", "now"] = ""
    judges: bool = False
    needs_experiment: bool = True
    has_objective: bool = False
    can_be_swept: bool = True

    @property
    def keeps_folder(self) -> bool:
        """Whether it leaves the folder of a run."""
        return self.folder == "run"

    @property
    def code_if_refused(self) -> int:
        """The exit code after a refusal of its config."""
        return UNTESTABLE if self.judges else WRONG_CONFIG

    def resolve(self) -> Callable[[Any], Objective]:
        """Return the function that does what the mode is for, imported now."""
        return resolve_name(self.runs)

    def run(self, job: Job) -> Objective:
        """Do a job in this mode and return its objective, None if it has none."""
        return self.resolve()(job)

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise an error if a config cannot be used in this mode."""
        if self.check is not None:
            resolve_name(self.check)(config)


_ROWS = (
    Mode(
        "train",
        says="trains; the default",
        example="runner model=mlp optimizer.lr=0.05",
        runs="runner.modes.train:train",
        folder="run",
        on_all_ranks=True,
        trains=True,
        resumes=True,
        has_objective=True,
    ),
    Mode(
        "check",
        says="tries out an experiment without its data, and trains nothing",
        example="runner mode=check experiment=stdlib_lm_plain",
        runs="runner.modes.check:check",
        resumes=True,
    ),
    Mode(
        "explain",
        says="lists what runs at which event, in which order and why",
        example="runner mode=explain '+algorithms=[mixup,ema]'",
        runs="runner.modes.explain:explain",
        resumes=True,
    ),
    Mode(
        "eval",
        says="evaluates a run's weights",
        example="runner mode=eval resume=latest",
        runs="runner.modes.evaluate:evaluate",
        folder="run",
        on_all_ranks=True,
        uses_weights=True,
        has_objective=True,
    ),
    Mode(
        "predict",
        says="writes a run's predictions to a file",
        example="runner mode=predict resume=latest",
        runs="runner.modes.evaluate:predict",
        keys={"format": ("parquet", "pt"), "split": ("eval", "train", "test")},
        folder="run",
        on_all_ranks=True,
        uses_weights=True,
    ),
    Mode(
        "prove",
        says="kills an experiment at random moments, and compares it bit by bit",
        example="runner mode=prove prove.kills=3",
        runs="runner.modes.prove:prove",
        check="runner.modes.prove:check_provable",
        keys={
            "batches": int,
            "kills": int,
            "seed": int,
            "save_interval": str,
            "patience": int,
            "without": list,
            "keep": bool,
        },
        folder="work",
        can_be_swept=False,
    ),
    Mode(
        "replay",
        says="retrains one batch of a run, and shows what happened in it",
        example="runner replay RUN 1234",
        runs="runner.modes.replay:replay",
        check="runner.modes.replay:check_replay",
        keys={"batch": int, "worst": int, "picture": str, "to": str, "debug": bool, "without": list},
        words=(1, 2),
        word_keys=("run", "batch"),
        on_all_ranks=True,
        trains_again="then",
        can_be_swept=False,
    ),
    Mode(
        "verify",
        says="retrains batches of a run, and compares digests",
        example="runner verify RUN",
        runs="runner.modes.verify:verify",
        check="runner.modes.verify:check_verify",
        keys={"batch": int, "batches": int, "tolerance": float, "pin": str},
        words=(1, 1),
        word_keys=("run",),
        on_all_ranks=True,
        trains_again="now",
        judges=True,
        can_be_swept=False,
    ),
    Mode(
        "lr_range",
        says="increases the learning rate in a short trial, and suggests one",
        example="runner mode=lr_range model=mlp",
        runs="runner.modes.lr_range:find_rate",
        check="runner.modes.lr_range:check_range",
        keys={"start": float, "end": float, "batches": int, "picture": str},
        on_all_ranks=True,
        can_be_swept=False,
    ),
    Mode(
        "compare",
        says="shows runs side by side, and finds the batch at which they diverge",
        example="runner compare RUN_A RUN_B",
        runs="runner.modes.compare:compare",
        words=(2, 1000),
        has_value=True,
        needs_experiment=False,
    ),
    Mode(
        "verdict",
        says="tells whether B is better than A, or how many seeds are missing",
        example="runner verdict experiment=digits_plain experiment=digits_fast",
        runs="runner.modes.verdict:show_verdict",
        keys={"metric": str, "budget": ("same", "any")},
        words=(2, 1000),
        composes=False,
        has_value=True,
        judges=True,
        needs_experiment=False,
    ),
    Mode(
        "table",
        says="writes a table of means over seeds, for a paper",
        example="runner table data=digits table.rows=experiment",
        runs="runner.modes.means:show_means",
        keys={
            "where": str,
            "rows": str,
            "columns": str,
            "metric": str,
            "format": ("markdown", "latex", "csv"),
        },
        words=(0, 1000),
        first_key="where",
        composes=False,
        needs_experiment=False,
    ),
    Mode(
        "export",
        says="writes the weights of a run to one file",
        example="runner export RUN model.pt",
        runs="runner.modes.export:export",
        words=(2, 2),
        composes=False,
        has_value=True,
        needs_experiment=False,
    ),
    Mode(
        "init",
        says="creates a new, working project",
        example="runner init my_project",
        runs="runner.modes.init:write_project",
        check="runner.modes.init:check_folder",
        words=(1, 1),
        has_value=True,
        needs_experiment=False,
        can_be_swept=False,
    ),
    Mode(
        "runs",
        says="lists the runs in outputs/, filtered and sorted",
        example="runner runs 'eval/loss<0.2 model=resnet8'",
        runs="runner.modes.runs:show_runs",
        keys={"where": str, "sort": str, "format": ("table", "csv"), "limit": int},
        words=(0, 1000),
        first_key="where",
        composes=False,
        needs_experiment=False,
    ),
    Mode(
        "list",
        says="lists the choices of config groups",
        example="runner list callbacks",
        runs="runner.modes.list:show_list",
        words=(0, 1),
        composes=False,
        has_value=True,
        needs_experiment=False,
    ),
    Mode(
        "help",
        says="explains a choice, a key, a class or a mode",
        example="runner help early_stopper",
        runs="runner.modes.help:show_help",
        words=(0, 1),
        composes=False,
        has_value=True,
        needs_experiment=False,
    ),
    Mode(
        "completion",
        says="prints the completion script of a shell",
        example="runner completion bash >> ~/.bashrc",
        runs="runner.modes.completion:show_completion",
        words=(1, 1),
        composes=False,
        has_value=True,
        needs_experiment=False,
    ),
    Mode(
        "sync",
        says="sends MLflow what it missed while it was unreachable",
        example="runner mode=sync",
        runs="runner.modes.sync:sync",
        accepts_any_run=True,
        needs_experiment=False,
    ),
)

MODES: dict[str, Mode] = {row.name: row for row in _ROWS}
"""All modes by name, in the order in which they are listed for users."""

TRAINING = tuple(row.name for row in _ROWS if row.trains)
"""Names of the modes that train, and whose runs can be resumed."""

WITHOUT_OUTPUT = tuple(row.name for row in _ROWS if row.folder == "temporary")
"""Names of the modes that write nothing into outputs/."""

MODE_KEYS = tuple(row.name for row in _ROWS if row.composes and (row.keys or row.has_value))
"""Keys of the config that belong to one mode each."""


def find_mode(name: Any) -> Mode:
    """Return the mode that is typed as `mode=<name>`."""
    mode = MODES.get(str(name))
    if mode is None:
        instead = about_foreign(f"mode={name}") or nearest(str(name), MODES)
        raise WrongKey("mode", "no such mode; " + instead, repr(name))
    return mode
