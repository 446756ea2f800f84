"""`mode=explain`: who runs at which event of a run, in which order and why. Nothing is trained, read or written.

With `explain.format=json` standard output is one JSON object, in a sweep one a job, with these keys, which stay:

- `hooks`: for each callback, algorithm and destination `name` (its key in the config), `kind` ('algorithm', 'callback',
  'destination', or 'trainer' for those that are always there), `class`, `does` (what its documentation says first);
- `events`: all events as they are declared, each with `event`, `when` and `runs`: in order, `name`, `does` (what the
  documentation of the hook says first, or null), `why` (a list of reasons for its place);
- `conflicts`: what cannot be combined, a sentence each;
- `unchecked`: keys that go into somebody's `**options`, of which nobody can say whether they are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.config import build
from runner.config.composed import targets
from runner.config.signatures import taken_as_options
from runner.destination import LoggerDestination
from runner.distributed.job import Job
from runner.event import Event
from runner.hooks import Algorithm, Hooks
from runner.modes.check import remove_empty, title_of
from runner.terminal import make_console, print_block

if TYPE_CHECKING:
    from runner.engine import Engine


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
"""How often an event fires; those that are not here fire once."""

PLACES = {
    "algorithm": "algorithms come first",
    "trainer": "the trainer's own come before callbacks",
    "callback": "callbacks come after algorithms",
    "destination": "destinations come last",
}
PLACES_AT_INIT = {
    "destination": "destinations come first, so that all can log",
    "trainer": "the trainer's own come before callbacks",
    "callback": "callbacks come after destinations",
    "algorithm": "algorithms come last",
}
"""Why one kind comes before or after another."""


def explain(job: Job) -> None:
    """Print who runs when and why, as a table or as JSON. Rank 0 alone.

    Raises:
        WrongConfig: something cannot be made.
    """
    from runner.modes.diagnosis import naming_fault

    wanted = job.config["explain"]["format"]
    with naming_fault(job.config), redirect_stdout(sys.stderr):  # what constructors print is no part of the answer
        explained = timeline(job.config)
    if wanted == "json":
        print(json.dumps(explained, indent=1))
    else:
        print_tables(title_of(job), explained)
    remove_empty(job)


def timeline(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `explain.format=json` prints."""
    engine, conflicts = make_engine(config)
    state = engine.state
    everyone: list[Hooks] = [*state.algorithms, *state.callbacks, *state.loggers]
    return {
        "hooks": [
            {"name": one.config_key, "kind": kind_of(one), "class": _path(type(one)), "does": _first_line(type(one))}
            for one in everyone
        ],
        "events": [
            {"event": str(event), "when": WHEN.get(event, "once"), "runs": [*_runs(engine, event)]} for event in Event
        ],
        "conflicts": conflicts,
        "unchecked": [f"{path}.{key}" for path, section in targets(config) for key in taken_as_options(path, section)],
    }


def make_engine(config: Mapping[str, Any]) -> tuple[Engine, list[str]]:
    """Return the engine of a run whose callbacks and algorithms were made but never called, and what conflicts."""
    from runner.engine import Engine, conflicts_among, sort_algorithms
    from runner.modes.dry_run import make_idle_trainer

    parts = build.make_parts(config)
    for key, one in (*parts["callbacks"].items(), *parts["algorithms"].items()):
        one.config_key = one.config_key or key
    callbacks = [one for one in parts["callbacks"].values() if not isinstance(one, LoggerDestination)]
    destinations = [one for one in parts["callbacks"].values() if isinstance(one, LoggerDestination)]
    algorithms = [*parts["algorithms"].values()]
    conflicts = [f"{one}.conflicts_with names {other}" for one, other in conflicts_among(algorithms)]
    try:
        algorithms = sort_algorithms(algorithms)
    except ValueError as error:
        conflicts.append(str(error))
    with make_idle_trainer(config, logs=bool(destinations)) as trainer:
        state = replace(
            trainer.state,
            algorithms=tuple(algorithms),
            callbacks=(*trainer.state.callbacks, *callbacks),
            loggers=tuple(destinations),
        )
        return Engine(state, type(trainer.logger)(state, destinations)), [*conflicts, *_never_called(state)]


def _never_called(state: Any) -> Iterator[str]:
    """Yield who listens to events that a model with its own training_step does not have."""
    from runner.arguments import refuse_unseen_hooks

    try:
        refuse_unseen_hooks(state)
    except ValueError as error:
        yield str(error)


def kind_of(one: Hooks) -> str:
    """Return what somebody who listens is."""
    from runner.metrics import TrainerLog, TrainMetrics

    if isinstance(one, LoggerDestination):
        return "destination"
    if isinstance(one, TrainMetrics | TrainerLog):
        return "trainer"
    return "algorithm" if isinstance(one, Algorithm) else "callback"


def _runs(engine: Engine, event: Event) -> Iterator[dict[str, Any]]:
    listeners = engine.listeners(event)
    for one in listeners:
        handlers = (type(one).run_event, getattr(one, event.value), type(one).apply)
        does = next(filter(None, map(_first_line, handlers)), None)
        yield {"name": one.config_key, "does": does, "why": [*_reasons(one, listeners, event)]}


def _reasons(one: Hooks, listeners: Sequence[Hooks], event: Event) -> Iterator[str]:
    """Yield why somebody runs at this place among those who listen to an event."""
    kind = kind_of(one)
    alike = [other for other in listeners if kind_of(other) == kind and other is not one]
    if len(alike) + 1 < len(listeners):
        yield (PLACES_AT_INIT if event is Event.INIT else PLACES)[kind]
    if not alike:
        return
    if kind == "algorithm" and event.closes_bracket:
        yield "in reverse, for this event closes what an earlier one opened"
    else:
        yield from [*_declared(one, alike)] or ["in the order given"]


def _declared(one: Any, others: Sequence[Any]) -> Iterator[str]:
    """Yield which declarations place an algorithm before or after others."""
    name = type(one).__name__
    for other in others:
        its_name = type(other).__name__
        for owner, key, names, wanted, phrase in (
            (name, "runs_before", getattr(one, "runs_before", ()), its_name, "before"),
            (name, "runs_after", getattr(one, "runs_after", ()), its_name, "after"),
            (its_name, "runs_before", getattr(other, "runs_before", ()), name, "after"),
            (its_name, "runs_after", getattr(other, "runs_after", ()), name, "before"),
        ):
            if wanted in names:
                yield f"{phrase} {other.config_key}, by {owner}.{key}"


def _first_line(thing: Any) -> str | None:
    """Return the first line of what is documented right there: a base's documentation says nothing about it."""
    if getattr(thing, "__func__", thing) in vars(Hooks).values():
        return None
    text = getattr(thing, "__doc__", None) or ""
    return text.strip().partition("\n")[0] or None


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def print_tables(title: str, explained: Mapping[str, Any]) -> None:
    """Print who there is, and who runs at which event."""
    from rich.table import Table
    from rich.text import Text

    hooks = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("who", "kind", "what it does"):
        hooks.add_column(column, overflow="fold")
    for one in explained["hooks"]:
        hooks.add_row(Text(one["name"]), one["kind"], Text(one["does"] or one["class"]))
    events = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("event", "when", "who runs, in order", "why"):
        events.add_column(column, overflow="fold")
    heard = [one for one in explained["events"] if one["runs"]]
    for one in heard:
        cells = (Text(one["event"].upper(), "cyan"), one["when"])
        for run in one["runs"]:
            who = f"{run['name']}: {run['does']}" if run["does"] else run["name"]
            events.add_row(*cells, Text(who), Text("; ".join(run["why"])))
            cells = ("", "")
    console = make_console()
    console.print(Text(title, "bold"))
    console.print(hooks, "", events, "", sep="\n")
    silent = len(explained["events"]) - len(heard)
    rows = [("warning", f"cannot be combined: {one}") for one in explained["conflicts"]]
    rows += [
        ("warning", f"{one} goes into **options: nobody knows whether it is read") for one in explained["unchecked"]
    ]
    rows += [("note", "evaluations come between BATCH_END and BATCH_CHECKPOINT or EPOCH_END and EPOCH_CHECKPOINT")]
    rows += [("silent", f"{silent} events more, to which nobody listens; explain.format=json lists all")]
    print_block("", rows)
