"""The row of a verb in the table of verbs, with its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runner.failures.exit_codes import UNTESTABLE, WRONG_CONFIG


@dataclass(frozen=True)
class Option:
    """An option of a verb, typed as `--name value`.

    Attributes:
        name: its name without dashes, such as `save-interval`.
        kind: the type of its value, or all allowed values. A `bool` is typed without a value; a `list` takes names
            separated by commas, and may be given more than once.
        default: its value when it is not typed.
        help: a description in one line.
    """

    name: str
    kind: type | tuple[str, ...]
    default: Any
    help: str

    @property
    def key(self) -> str:
        """Its name in `Command.options`."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Verb:
    """The action of a command, named by the first word after `runner`.

    Attributes:
        name: the word to type.
        help: a description for lists of verbs, in one line.
        example: a complete command.
        group: the heading under which `runner --help` lists it.
        words: its further words, as in a synopsis: `RUN [BATCH]`; optional words are in brackets, repeatable ones end
            in three dots.
        options: its options.
        uses_run: its use of the saved run that its first word names: 'resume' takes the state or the weights, 'fork'
            the state after a batch for a new run, 'rerun' the config for a new start, and 'retrain' trains some batches
            again. Empty if it names no run, or the verb reads the run itself.
        composes: whether it needs a config. If not, it runs before Hydra is imported, and takes no overrides.
        folder: 'run' is the folder of a run in outputs/, which is kept and recorded; 'work' is a folder there that the
            verb removes itself; 'temporary' is an empty folder outside of the working directory, removed at the end.
        on_all_ranks: whether it runs on all ranks of the launch; otherwise only on rank 0.
        trains: whether it trains a run that can be resumed.
        uses_weights: whether it uses the weights of a saved run without training.
        imports_kept_code: whether it imports the modules kept with the run instead of the current ones.
        judges: whether its exit code is an answer for `git bisect run`: 0 is good, 1 is bad, and 125, after a refusal,
            skips the commit.
        needs_experiment: whether its config must describe a complete experiment, and its saved run must have trained.
        has_objective: whether it returns an objective to compare the jobs of a sweep by.
        can_be_swept: whether it may run as a job of a sweep.
    """

    name: str
    help: str
    example: str
    group: str = "Tools"
    words: str = ""
    options: tuple[Option, ...] = ()
    uses_run: Literal["", "resume", "fork", "rerun", "retrain"] = ""
    composes: bool = True
    folder: Literal["run", "work", "temporary"] = "temporary"
    on_all_ranks: bool = False
    trains: bool = False
    uses_weights: bool = False
    imports_kept_code: bool = False
    judges: bool = False
    needs_experiment: bool = True
    has_objective: bool = False
    can_be_swept: bool = False

    @property
    def first_word(self) -> str:
        """The name of its first word, such as RUN; empty if it takes no words."""
        return self.words.partition(" ")[0].strip("[].")

    @property
    def least_words(self) -> int:
        """The number of words that must follow it."""
        return sum(not word.startswith("[") for word in self.words.split())

    @property
    def most_words(self) -> int:
        """The number of words that may follow it."""
        return 1000 if "..." in self.words else len(self.words.split())

    @property
    def keeps_folder(self) -> bool:
        """Whether it keeps the folder of a run."""
        return self.folder == "run"

    @property
    def code_if_refused(self) -> int:
        """The exit code after a refusal of its config."""
        return UNTESTABLE if self.judges else WRONG_CONFIG

    @property
    def defaults(self) -> dict[str, Any]:
        """The default values of its options, by key."""
        return {option.key: option.default for option in self.options}
