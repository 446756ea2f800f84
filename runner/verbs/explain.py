"""`runner explain`: lists what runs at which event, in which order and why. Trains nothing and reads no data.

With `--json` the result has these stable keys:

- `hooks`: for each callback, algorithm and destination its `name` (its key in the config), `kind` ('algorithm',
  'callback', 'destination', or 'trainer' for those that are always there), `class`, and `does` (the first line of its
  docstring, or null);
- `events`: all events in the order of their declaration, each with `event`, `when` and `runs`, which lists in order
  `name`, `does` (the first line of the hook's docstring, or null) and `why` (a list of reasons for its position);
- `conflicts`: a sentence for each combination that is not possible;
- `unchecked`: keys that go into the `**options` of a class, and so may be ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.config import build
from runner.config.experiment import Experiment
from runner.core.destination import LoggerDestination
from runner.core.hooks import Algorithm, Hooks
from runner.files.printable import printable
from runner.records.job import Job
from runner.terminal.answer import set_fields
from runner.terminal.console import Unpadded, make_console, print_block
from runner.timing.event import Event

if TYPE_CHECKING:
    from runner.core.engine import Engine


WHEN = {
    **dict.fromkeys(("iteration_start", "iteration_end", "iteration_checkpoint"), "each iteration"),
    **dict.fromkeys(("epoch_start", "epoch_end", "epoch_checkpoint"), "each epoch"),
    **dict.fromkeys(("before_dataloader", "after_dataloader", "batch_start", "before_train_batch"), "each batch"),
    **dict.fromkeys(("before_forward", "after_forward", "before_loss", "after_loss"), "each microbatch"),
    **dict.fromkeys(("before_backward", "after_backward"), "each microbatch"),
    **dict.fromkeys(("after_train_batch", "batch_end", "batch_checkpoint"), "each batch"),
    **dict.fromkeys(("eval_before_all", "eval_after_all"), "each evaluation"),
    **dict.fromkeys(("eval_start", "eval_end"), "each evaluator"),
    **dict.fromkeys(("eval_batch_start", "eval_before_forward"), "each eval batch"),
    **dict.fromkeys(("eval_after_forward", "eval_batch_end"), "each eval batch"),
    **dict.fromkeys(("eval_standalone_start", "eval_standalone_end"), "trainer.eval()"),
    **dict.fromkeys(("predict_start", "predict_end"), "trainer.predict()"),
    **dict.fromkeys(("predict_batch_start", "predict_before_forward"), "each batch predicted"),
    **dict.fromkeys(("predict_after_forward", "predict_batch_end"), "each batch predicted"),
}
"""How often each event fires; unlisted events fire once."""

PLACES = {
    "algorithm": "algorithms come first",
    "trainer": "the Trainer's own hooks run before callbacks",
    "callback": "callbacks come after algorithms",
    "destination": "destinations come last",
}
PLACES_AT_INIT = {
    "destination": "destinations come first, so that all can log",
    "trainer": "the Trainer's own hooks run before callbacks",
    "callback": "callbacks come after destinations",
    "algorithm": "algorithms come last",
}
"""Why one kind of hook runs before or after another: `PLACES_AT_INIT` at INIT, `PLACES` at all other events."""


def run(job: Job) -> None:
    """Print what runs when and why. Rank 0 only."""
    from runner.trials.diagnosis import naming_fault

    with naming_fault(job.experiment, job.choices), redirect_stdout(sys.stderr):  # constructors may print
        explained = timeline(job.experiment)
    set_fields(result=explained)
    print_tables(job.title, explained)


def timeline(experiment: Experiment) -> dict[str, Any]:
    """Return the result for `--json`; the module docstring lists its keys."""
    engine, conflicts = make_engine(experiment)
    state = engine.state
    everyone: list[Hooks] = [*state.algorithms, *state.callbacks, *state.loggers]
    return {
        "hooks": [
            {"name": x.config_key, "kind": kind_of(x), "class": _path(type(x)), "does": _first_line(type(x))}
            for x in everyone
        ],
        "events": [
            {"event": str(event), "when": WHEN.get(event, "once"), "runs": [*_runs(engine, event)]} for event in Event
        ],
        "conflicts": conflicts,
        "unchecked": [f"{section.path}.{key}" for section in experiment.sections() for key in section.unchecked()],
    }


def make_engine(experiment: Experiment) -> tuple[Engine, list[str]]:
    """Return the engine of a run and its conflicts. Callbacks and algorithms are made, but not called."""
    from runner.core.engine import Engine
    from runner.core.ordering import conflicts_among, sort_algorithms
    from runner.training.arguments import split_schedulers
    from runner.trials.dry_run import make_idle_trainer

    parts = build.make_parts(experiment)
    for key, part in (*parts["callbacks"].items(), *parts["algorithms"].items()):
        part.config_key = part.config_key or key
    callbacks = [part for part in parts["callbacks"].values() if not isinstance(part, LoggerDestination)]
    destinations = [part for part in parts["callbacks"].values() if isinstance(part, LoggerDestination)]
    algorithms = [*parts["algorithms"].values(), *split_schedulers(parts["schedulers"])[1]]
    conflicts = [f"{algorithm}.conflicts_with names {other}" for algorithm, other in conflicts_among(algorithms)]
    try:
        algorithms = sort_algorithms(algorithms)
    except ValueError as error:
        conflicts.append(str(error))
    with make_idle_trainer(experiment, logs=bool(destinations)) as trainer:
        state = replace(
            trainer.state,
            algorithms=tuple(algorithms),
            callbacks=(*trainer.state.callbacks, *callbacks),
            loggers=tuple(destinations),
        )
        return Engine(state, type(trainer.logger)(state, destinations)), [*conflicts, *_never_called(state)]


def _never_called(state: Any) -> Iterator[str]:
    """Yield a sentence about hooks that are never called because the model has its own `training_step`."""
    from runner.training.arguments import refuse_unseen_hooks

    try:
        refuse_unseen_hooks(state)
    except ValueError as error:
        yield str(error)


def kind_of(listener: Hooks) -> str:
    """Return the kind of an object with hooks: 'algorithm', 'callback', 'destination' or 'trainer'."""
    from runner.training.metrics import TrainerLog, TrainMetrics

    if isinstance(listener, LoggerDestination):
        return "destination"
    if isinstance(listener, TrainMetrics | TrainerLog):
        return "trainer"
    return "algorithm" if isinstance(listener, Algorithm) else "callback"


def _runs(engine: Engine, event: Event) -> Iterator[dict[str, Any]]:
    listeners = engine.listeners(event)
    for listener in listeners:
        handlers = (type(listener).run_event, getattr(listener, event.value), type(listener).apply)
        does = next(filter(None, map(_first_line, handlers)), None)
        yield {"name": listener.config_key, "does": does, "why": [*_reasons(listener, listeners, event)]}


def _reasons(listener: Hooks, listeners: Sequence[Hooks], event: Event) -> Iterator[str]:
    """Yield the reasons for the position of an object among all with a hook for an event."""
    kind = kind_of(listener)
    alike = [other for other in listeners if kind_of(other) == kind and other is not listener]
    if len(alike) + 1 < len(listeners):
        yield (PLACES_AT_INIT if event is Event.INIT else PLACES)[kind]
    if not alike:
        return
    if kind == "algorithm" and event.closes_bracket:
        yield "in reverse order, as this event closes what an earlier one opened"
    else:
        yield from [*_declared(listener, alike)] or ["in the order given"]


def _declared(listener: Any, alike: Sequence[Any]) -> Iterator[str]:
    """Yield the declarations that put an algorithm before or after others."""
    name = type(listener).__name__
    for other in alike:
        other_name = type(other).__name__
        for owner, key, names, declared_name, phrase in (
            (name, "runs_before", getattr(listener, "runs_before", ()), other_name, "before"),
            (name, "runs_after", getattr(listener, "runs_after", ()), other_name, "after"),
            (other_name, "runs_before", getattr(other, "runs_before", ()), name, "after"),
            (other_name, "runs_after", getattr(other, "runs_after", ()), name, "before"),
        ):
            if declared_name in names:
                yield f"{phrase} {other.config_key}, by {owner}.{key}"


def _first_line(thing: Any) -> str | None:
    """Return the first line of an object's own docstring; one inherited from `Hooks` does not describe it."""
    if getattr(thing, "__func__", thing) in vars(Hooks).values():
        return None
    text = getattr(thing, "__doc__", None) or ""
    return text.strip().partition("\n")[0] or None


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def print_tables(title: str, explained: Mapping[str, Any]) -> None:
    """Print a table of all hooks, and a table of what runs at which event."""
    from rich.table import Table
    from rich.text import Text

    hooks = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("name", "kind", "what it does"):
        hooks.add_column(column, overflow="fold")
    for row in explained["hooks"]:
        hooks.add_row(Text(printable(row["name"])), row["kind"], Text(printable(row["does"] or row["class"])))
    events = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("event", "when", "what runs, in order", "why"):
        events.add_column(column, overflow="fold")
    with_hooks = [event for event in explained["events"] if event["runs"]]
    for row in with_hooks:
        cells = (Text(row["event"].upper(), "cyan"), row["when"])
        for run in row["runs"]:
            name = f"{run['name']}: {run['does']}" if run["does"] else run["name"]
            events.add_row(*cells, Text(printable(name)), Text(printable("; ".join(run["why"]))))
            cells = ("", "")
    console = make_console()
    console.print(Text(printable(title), "bold"))
    console.print(Unpadded(hooks), "", Unpadded(events), "", sep="\n")
    without_hooks = len(explained["events"]) - len(with_hooks)
    rows = [("warning", f"cannot be combined: {conflict}") for conflict in explained["conflicts"]]
    for key in explained["unchecked"]:
        rows.append(("warning", f"{key} goes into **options, so it may be unused"))
    rows += [("note", "evaluations run between BATCH_END and BATCH_CHECKPOINT or EPOCH_END and EPOCH_CHECKPOINT")]
    rows += [("note", f"{without_hooks} more events have no hooks; --json lists them")]
    print_block("", rows)
