"""The experiment of a command: the config that Hydra composed, checked, as typed sections and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner.config.composed import check_keys, optimizer_sections
from runner.config.section import Section, sections_in
from runner.training.budget import Budget

if TYPE_CHECKING:
    from runner.distributed.launch import Launch


@dataclass(frozen=True)
class Experiment:
    """An immutable description of what to train, and how.

    The constructor checks everything that can be checked without importing a target. `runner.config.build` checks the
    targets and their arguments, and makes the objects.

    Attributes:
        plain: the composed and resolved config in plain containers, as runs record it.

    Raises:
        WrongKey: a key is unknown, a section has no target, or a value is not allowed.
    """

    plain: dict[str, Any]

    def __post_init__(self) -> None:
        check_keys(self.plain)
        self.budget  # noqa: B018 (raises for a wrong budget)

    def changed(self, **values: Any) -> Experiment:
        """Return this experiment with new values for some keys."""
        return Experiment({**self.plain, **values})

    def with_trainer(self, **arguments: Any) -> Experiment:
        """Return this experiment with new values for some arguments of the Trainer."""
        return self.changed(trainer=self.trainer.changed(**arguments).plain)

    def with_callbacks(self, keys: Collection[str]) -> Experiment:
        """Return this experiment with only the callbacks of these keys."""
        return self.changed(callbacks={key: section.plain for key, section in self.callbacks.items() if key in keys})

    def without_callbacks(self, keys: Collection[str]) -> Experiment:
        """Return this experiment without the callbacks of these keys."""
        return self.with_callbacks([key for key in self.callbacks if key not in keys])

    def on_devices_of(self, other: Experiment) -> Experiment:
        """Return this experiment with the processes and device of another one."""
        device = other.trainer.get("device", "auto")
        return self.changed(launch=other._section("launch").plain).with_trainer(device=device)

    def _section(self, key: str) -> Section:
        return Section(key, self.plain[key])

    @cached_property
    def model(self) -> Section:
        """The section of the model."""
        return self._section("model")

    @cached_property
    def data(self) -> Section:
        """The section of the data."""
        return self._section("data")

    @cached_property
    def trainer(self) -> Section:
        """The section of the Trainer."""
        return self._section("trainer")

    @cached_property
    def launch(self) -> Launch:
        """The number of processes and how they start; checked before other sections, because they start early."""
        section = self._section("launch")
        section.check()
        return section.make()

    @cached_property
    def optimizers(self) -> Mapping[str, Section]:
        """The sections of the optimizers by the submodule that each trains; '' for the whole model."""
        sections = optimizer_sections(self.plain)
        return {path.partition(".")[2]: Section(path, section) for path, section in sections.items()}

    @cached_property
    def scheduler(self) -> Section | None:
        """The section of the scheduler."""
        return self._section("scheduler") if self.plain.get("scheduler") else None

    @cached_property
    def folds(self) -> Section | None:
        """The section of the folds, which says which data cross-validation leaves out."""
        return self._section("folds") if self.plain["folds"] else None

    @cached_property
    def callbacks(self) -> Mapping[str, Section]:
        """The sections of the callbacks, by key."""
        return sections_in("callbacks", self.plain.get("callbacks"))

    @cached_property
    def algorithms(self) -> Mapping[str, Section]:
        """The sections of the algorithms, by key."""
        return sections_in("algorithms", self.plain.get("algorithms"))

    @cached_property
    def budget(self) -> Budget | None:
        """The time or compute that determines the length of training."""
        return None if self.plain["budget"] is None else Budget.parse(self.plain["budget"])

    @property
    def seed(self) -> int:
        """The seed of all random streams."""
        return self.plain["seed"]

    @property
    def init_weights(self) -> str:
        """How initial weights are drawn: 'in_order', or 'by_name'."""
        return self.plain["init_weights"]

    @property
    def run_name(self) -> str | int | None:
        """The name given to the run; None: a default name."""
        return self.plain["run_name"]

    @property
    def objective(self) -> Any:
        """The metric that jobs of a sweep are compared by, or a list of metrics; None: the first metric."""
        return self.plain["objective"]

    @property
    def test(self) -> str | None:
        """The weights to evaluate on the test data after training: 'best' or 'last'."""
        return self.plain["test"]

    def sections(self) -> Iterator[Section]:
        """Yield the sections of all objects, outer ones first."""
        return Section("", self.plain).nested()

    def section_at(self, path: str) -> Section:
        """Return the section at a path.

        Raises:
            KeyError: there is no section at that path.
        """
        return {section.path: section for section in self.sections()}[path]
