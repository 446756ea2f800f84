from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Event, LoggerDestination, Trainer
from runner.data import TensorLoader
from runner.engine import name_hooks, order_algorithms, snake_case
from runner.hooks import Hooks

HEARD: list[tuple[str, str]] = []


class Hears:
    """Notes its name and the event, at every event."""

    config_key: str

    def __init__(self, name: str):
        self.name = name

    def run_event(self, event, state, logger):
        HEARD.append((self.name, event.name))

    def close(self, state, logger):
        HEARD.append((self.name, "close"))

    def post_close(self):
        HEARD.append((self.name, "post_close"))


class A(Hears, Algorithm): ...


class C(Hears, Callback): ...


class L(Hears, LoggerDestination): ...


def make_trainer(algorithms: Any = (), callbacks: Any = (), loggers: Any = (), **arguments: Any) -> Trainer:
    HEARD.clear()
    data = TensorLoader(torch.ones(6, 3), torch.zeros(6, dtype=torch.long), batch_size=2, shuffle=False)
    defaults = {
        "model": ClassificationModel(nn.Linear(3, 2), 2),
        "train_dataloader": data,
        "eval_dataloader": data,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "device": "cpu",
        "max_duration": "2ep",
    }
    return Trainer(algorithms=algorithms, callbacks=callbacks, loggers=loggers, **(defaults | arguments))


def names_at(event: str) -> list[str]:
    return [name for name, heard in HEARD if heard == event]


def test_who_acts_first_at_every_event_of_a_run():
    algorithms, callbacks, loggers = ([kind(f"{kind.__name__}{i}") for i in (1, 2)] for kind in (A, C, L))
    with make_trainer(algorithms, callbacks, loggers) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])
        for event in Event:
            expected = ["A1", "A2", "C1", "C2", "L1", "L2"]
            if event is Event.INIT:
                expected = ["L1", "L2", "C1", "C2", "A1", "A2"]
            if event.name in (
                "AFTER_FORWARD",
                "AFTER_LOSS",
                "AFTER_BACKWARD",
                "AFTER_TRAIN_BATCH",
                "EVAL_AFTER_FORWARD",
                "PREDICT_AFTER_FORWARD",
            ):
                expected[:2] = ["A2", "A1"]
            heard = names_at(event.name)
            assert heard and heard == expected * (len(heard) // 6), event
            named = [getattr(one, "name", None) for one in trainer.engine.listeners(event)]
            assert [name for name in named if name] == expected


def test_closing_events_nest_what_algorithms_wrap_in_a_run():
    with make_trainer([A("outer"), A("inner")], max_duration="1ba", eval_dataloader=None) as trainer:
        trainer.fit()
    inside = [(name, event) for name, event in HEARD if "FORWARD" in event]
    assert inside == [
        ("outer", "BEFORE_FORWARD"),
        ("inner", "BEFORE_FORWARD"),
        ("inner", "AFTER_FORWARD"),
        ("outer", "AFTER_FORWARD"),
    ]
    assert [name for name, event in HEARD if event == "AFTER_DATALOADER"] == ["outer", "inner"]
    assert [name for name, event in HEARD if event == "AFTER_LOAD"] == ["outer", "inner"]


def test_construction_fires_three_events_with_or_without_a_checkpoint():
    with make_trainer(callbacks=C("c")):
        assert HEARD == [("c", "INIT"), ("c", "BEFORE_LOAD"), ("c", "AFTER_LOAD")]


def test_optimizers_come_after_init_and_schedulers_with_them():
    class Looks(Callback):
        def init(self, state, logger):
            assert state.optimizers == [] and state.schedulers == []
            assert next(state.unwrapped_model.parameters()).device == state.device

        def before_load(self, state, logger):
            assert len(state.optimizers) == len(state.schedulers) == 1

    class Widens(Algorithm):
        def init(self, state, logger):
            state.unwrapped_model.module = nn.Linear(3, 2, bias=False)

    stepped = {"schedulers": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with make_trainer([Widens()], [Looks()], **stepped) as trainer:
        (group,) = trainer.state.optimizers[0].param_groups
        assert [one.shape for one in group["params"]] == [(2, 3)]
        trainer.fit()


@pytest.mark.parametrize("event", list(Event))
def test_events_fire_from_outside_in_any_spelling(event: Event):
    model = ClassificationModel(nn.Linear(3, 2), 2)
    model.metrics = lambda train: {}  # type: ignore[method-assign]
    with make_trainer(callbacks=[C("c")], model=model) as trainer:
        HEARD.clear()
        for spelling in (event, event.value, event.name):
            trainer.engine.run_event(spelling)
        assert [("c", event.name)] * 3 == HEARD


def test_aliases_are_methods_and_strings():
    heard = []

    class Early(Callback):
        def training_start(self, state, logger):
            heard.append("training_start")

        def training_end(self, state, logger):
            heard.append("training_end")

    with make_trainer(callbacks=[Early()]) as trainer:
        for spelling in ("training_start", "TRAINING_END", Event.TRAINING_START, "fit_end"):
            trainer.engine.run_event(spelling)
        trainer.fit()
    assert heard == [
        "training_start",
        "training_end",
        "training_start",
        "training_end",
        "training_start",
        "training_end",
    ]


def test_an_unknown_event_is_an_error_with_the_nearest():
    with make_trainer() as trainer, pytest.raises(ValueError, match="event='epoch_strat'.*'epoch_start'"):
        trainer.engine.run_event("epoch_strat")


def test_only_overridden_methods_are_in_the_table():
    class One(Callback):
        def batch_end(self, state, logger): ...

    class Inherits(One): ...

    one, inherits, nothing = One(), Inherits(), Callback()
    with make_trainer(callbacks=[one, inherits, nothing]) as trainer:
        assert trainer.engine.listeners("batch_end") == [one, inherits]
        for event in Event:
            if event is not Event.BATCH_END:
                assert not {one, inherits, nothing} & {*trainer.engine.listeners(event)}


def test_a_hook_set_on_the_object_itself_is_called():
    one, heard = Callback(), []
    one.batch_end = lambda state, logger: heard.append(state.timestamp.batch)  # type: ignore[method-assign]
    with make_trainer(callbacks=[one], max_duration="2ba") as trainer:
        trainer.fit()
    assert heard == [1, 2]


def test_who_overrides_run_event_hears_all_and_its_methods_only_through_itself():
    class Both(Callback):
        def __init__(self, forward):
            self.forward, self.events, self.ends = forward, [], 0

        def run_event(self, event, state, logger):
            self.events.append(event)
            if self.forward:
                super().run_event(event, state, logger)

        def batch_end(self, state, logger):
            self.ends += 1

    silent, passing = Both(False), Both(True)
    with make_trainer(callbacks=[silent, passing]) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])
    assert {*silent.events} == {*Event} and silent.events == passing.events
    assert silent.events.count(Event.BATCH_END) == 6
    assert (silent.ends, passing.ends) == (0, 6)
    assert all(type(event) is Event for event in silent.events)


def test_a_run_event_override_may_pass_on_to_methods_under_the_earliest_names():
    class Both(Callback):
        def run_event(self, event, state, logger):
            super().run_event(event, state, logger)

        def training_start(self, state, logger):
            HEARD.append(("both", "training_start"))

    with make_trainer(callbacks=[Both()]) as trainer:
        trainer.fit()
    assert HEARD == [("both", "training_start")]


# Methods that cannot be called


def takes(*names: str) -> Any:
    """A function with these arguments."""
    return eval(f"lambda {', '.join(names)}: None")


WRONG_HOOKS = {
    "no logger": ("batch_end", takes("self", "state"), "state, logger"),
    "nothing": ("epoch_end", takes("self"), "state, logger"),
    "no self": ("fit_start", takes("state", "logger"), "state, logger"),
    "one more": ("eval_end", takes("self", "state", "logger", "metrics"), "state, logger"),
    "earliest name": ("training_end", takes("self", "state"), "state, logger"),
    "keyword": ("batch_start", takes("self", "state", "*", "logger"), "state, logger"),
    "a number": ("epoch_start", 3.0, "state, logger"),
    "close": ("close", takes("self"), "state, logger"),
    "post_close": ("post_close", takes("self", "state"), ""),
    "run_event": ("run_event", takes("self", "event"), "event, state, logger"),
    "state_dict": ("state_dict", takes("self", "state"), ""),
    "load_state_dict": ("load_state_dict", takes("self"), "state"),
}


@pytest.mark.parametrize("name", WRONG_HOOKS)
@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers"])
def test_a_method_that_cannot_be_called_is_refused_when_the_trainer_is_made(kind: str, name: str):
    hook, method, given = WRONG_HOOKS[name]
    base = {"algorithms": Algorithm, "callbacks": Callback, "loggers": LoggerDestination}[kind]
    mine = type("Mine", (base,), {hook: method})
    hook = {"training_end": "fit_end"}.get(hook, hook)
    with pytest.raises(TypeError) as raised:
        make_trainer(**{kind: [mine()]})
    define = f"{hook}(self, {given})" if given else f"{hook}(self)"
    assert str(raised.value) == (
        f"Mine.{hook} cannot be called as {hook}({given}): define {define}, or give what is no hook another name"
    )


def test_a_hook_that_would_do_nothing_is_refused():
    class Yields(Callback):
        def batch_end(self, state, logger):
            yield

    class Waits(Callback):
        async def batch_end(self, state, logger): ...

    for wrong in (Yields, Waits):
        with pytest.raises(TypeError, match=rf"{wrong.__name__}.batch_end would do nothing when called"):
            make_trainer(callbacks=[wrong()])


def test_so_are_an_attribute_in_the_place_of_a_hook_and_what_a_destination_takes():
    class Started(Callback):
        def __init__(self):
            self.epoch_start = 0.0  # type: ignore[assignment]

    class Destination(LoggerDestination):
        def log_metrics(self, metrics): ...

    class Averages(Algorithm):
        def evaluation_weights(self): ...

    with pytest.raises(TypeError, match=r"Started.epoch_start cannot be called as epoch_start\(state, logger\)"):
        make_trainer(callbacks=[Started()])
    with pytest.raises(TypeError, match=r"define log_metrics\(self, metrics, step\)"):
        make_trainer(callbacks=[Destination()])
    with pytest.raises(TypeError, match=r"define evaluation_weights\(self, state\)"):
        make_trainer([Averages()])


def test_whatever_can_be_called_is_called():
    heard = []

    def passes_on(method):
        @functools.wraps(method)
        def batch_end(self, state, logger):
            method(self, state)

        return batch_end

    class Mine(Callback):
        def __init__(self):  # without super().__init__()
            self.fit_end = lambda *arguments: heard.append("fit_end")  # type: ignore[method-assign]
            self.batch_start = slice  # type: ignore[assignment]  # built in C, without a signature

        @torch.no_grad()
        def fit_start(self, state, logger):
            heard.append("fit_start")

        @passes_on
        def batch_end(self, state):
            heard.append("batch_end")

        @staticmethod
        def epoch_start(state, logger):
            heard.append("epoch_start")

        def epoch_end(self, _, logger=None, *others, verbose=False):
            heard.append("epoch_end")

    class Own(Algorithm):
        def __init__(self):  # without super().__init__()
            self.count = 0

        def close(self, *arguments):
            heard.append("close")

    with make_trainer([Own()], [Mine()], max_duration="3ba") as trainer:
        trainer.fit()
        assert trainer.state.algorithms[0].state_dict() == trainer.state.callbacks[1].state_dict() == {}
    assert heard == ["fit_start", "epoch_start", *["batch_end"] * 3, "epoch_end", "fit_end", "close"]


def test_on_the_command_line_it_is_one_message(run_here: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from runner import Callback\n\n\nclass Mine(Callback):\n    def close(self, state): ...\n"
    )
    ended = run_here("model=mlp", "~callbacks.mlflow_logger", "+callbacks.mine._target_=own.Mine", code=2)
    assert ended.err == (
        "error: Mine.close cannot be called as close(state, logger): "
        "define close(self, state, logger), or give what is no hook another name\n"
    )


# Errors in handlers


class Fails(Callback):
    """Raises at one event, or in `close` or `post_close`."""

    def __init__(self, at: str, error: BaseException, skip: int = 0):
        self.at, self.error, self.skip = at, error, skip

    def run_event(self, event, state, logger):
        if event.value == self.at:
            self.skip -= 1
            if self.skip < 0:
                raise self.error

    def close(self, state, logger):
        HEARD.append(("fails", "close"))
        if self.at == "close":
            raise self.error

    def post_close(self):
        HEARD.append(("fails", "post_close"))
        if self.at == "post_close":
            raise self.error


class Outcome(LoggerDestination):
    """Notes how the run ended, as one that marks runs would."""

    error: BaseException | str | None = "never closed"

    def close(self, state, logger):
        self.error = state.error


CLOSED = [
    ("c1", "close"),
    ("fails", "close"),
    ("c2", "close"),
    ("a", "close"),
    ("l", "close"),
    ("c1", "post_close"),
    ("fails", "post_close"),
    ("c2", "post_close"),
    ("a", "post_close"),
    ("l", "post_close"),
]


def run_everything(fails: Fails, outcome: Outcome) -> None:
    hooks = {"algorithms": [A("a")], "callbacks": [C("c1"), fails, C("c2")], "loggers": [L("l"), outcome]}
    with make_trainer(**hooks) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_an_error_at_any_event_closes_all_and_goes_on_unchanged(event: Event, kind: type[BaseException]):
    error, outcome = kind("mine"), Outcome()
    with pytest.raises(kind) as raised:
        run_everything(Fails(event.value, error), outcome)
    assert raised.value is error and error.args == ("mine",)
    assert error.__cause__ is None and error.__context__ is None
    assert len(error.__notes__) == 1
    assert error.__notes__[0].startswith(f"raised by 'fails' at {event.name}, epoch ")
    assert [entry for entry in HEARD if entry[1].endswith("close")] == CLOSED, "callbacks first, destinations last"
    assert outcome.error is error, "whoever marks runs knows that this one failed, and why"


def test_the_note_says_which_object_at_which_epoch_and_batch():
    error = ValueError("mine")
    fails = Fails("after_loss", error, skip=4)
    fails.config_key = "my_key"
    with pytest.raises(ValueError), make_trainer(callbacks=[fails]) as trainer:
        trainer.fit()
    assert error.__notes__ == ["raised by 'my_key' at AFTER_LOSS, epoch 1, batch 4 (1 in epoch)"]


def test_the_note_names_an_object_that_is_empty_by_its_own_count():
    class Empty(Callback):
        def __len__(self):
            return 0

        def fit_start(self, state, logger):
            raise ValueError("mine")

    with pytest.raises(ValueError) as raised, make_trainer(callbacks=[Empty()]) as trainer:
        trainer.fit()
    assert raised.value.__notes__ == ["raised by 'empty' at FIT_START, epoch 0, batch 0 (0 in epoch)"]


@pytest.mark.parametrize("at", ["close", "post_close"])
def test_an_error_in_closing_leaves_nobody_unclosed_and_is_raised_at_the_end(at: str):
    error, outcome = OSError("mine"), Outcome()
    with pytest.raises(OSError) as raised:
        run_everything(Fails(at, error), outcome)
    assert raised.value is error
    assert error.__notes__ == [f"raised by fails.{at} while closing; everything else was closed all the same"]
    assert [entry for entry in HEARD if entry[1].endswith("close")] == CLOSED
    assert outcome.error is None, "the run itself was all right"


def test_errors_in_closing_after_an_error_are_its_notes():
    error = ValueError("first")
    callbacks = [
        Fails("batch_end", error),
        Fails("close", OSError("second")),
        Fails("post_close", OSError("third")),
        C("c"),
    ]
    outcome = Outcome()
    with pytest.raises(ValueError) as raised, make_trainer(callbacks=callbacks, loggers=outcome) as trainer:
        trainer.fit()
    assert raised.value is error is outcome.error
    assert error.__notes__ == [
        "raised by 'fails' at BATCH_END, epoch 0, batch 1 (1 in epoch)",
        "while closing, fails_2.close raised OSError: second",
        "while closing, fails_3.post_close raised OSError: third",
    ]
    assert names_at("close").count("c") == names_at("post_close").count("c") == 1


def test_an_error_in_the_body_of_with_marks_the_run_failed_too():
    error, outcome = ValueError("mine"), Outcome()
    with pytest.raises(ValueError) as raised, make_trainer(loggers=outcome) as trainer:
        trainer.fit()
        raise error
    assert raised.value is error is outcome.error


@pytest.mark.parametrize("where", ["forward", "loss", "data", "optimizer"])
def test_an_error_outside_of_handlers_closes_all_as_well(where: str):
    error = ValueError("mine")

    class Model(ClassificationModel):
        def forward(self, batch):
            if where == "forward":
                raise error
            return super().forward(batch)

        def loss(self, outputs, batch):
            if where == "loss":
                raise error
            return super().loss(outputs, batch)

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            if where == "optimizer":
                raise error
            return super().step(closure)

    def data():
        yield torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
        if where == "data":
            raise error

    outcome = Outcome()
    trainer = make_trainer(
        loggers=[outcome, L("l")],
        callbacks=[C("c")],
        model=Model(nn.Linear(3, 2), 2),
        train_dataloader=data(),
        optimizers=lambda params: Optimizer(params, lr=0.1),
    )
    with pytest.raises(ValueError) as raised:
        trainer.fit()
    assert raised.value is error is outcome.error
    closed = [entry for entry in HEARD if entry[1].endswith("close")]
    assert closed == [("c", "close"), ("l", "close"), ("c", "post_close"), ("l", "post_close")]


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD])
def test_an_error_in_construction_closes_all_once(event: Event):
    with pytest.raises(ValueError):
        make_trainer(callbacks=[C("c"), Fails(event.value, ValueError("mine"))])
    assert names_at("close") == names_at("post_close") == ["c", "fails"]


def test_close_happens_once():
    with make_trainer(callbacks=[C("c")]) as trainer:
        trainer.fit()
        assert not names_at("close")
        trainer.close()
        trainer.close()
    trainer.engine.close()
    assert names_at("close") == names_at("post_close") == ["c"]


@pytest.mark.parametrize("listened", [True, False])
def test_a_closed_engine_refuses_events(listened: bool):
    data = TensorLoader(torch.ones(6, 3), torch.zeros(6, dtype=torch.long), batch_size=2, shuffle=False)
    trainer = make_trainer(callbacks=[C("c")] if listened else [])
    trainer.close()
    HEARD.clear()
    for event in ("fit_start", Event.BATCH_END, "EVAL_START"):
        with pytest.raises(RuntimeError, match=r"came after close\(\); make a new Trainer"):
            trainer.engine.run_event(event)
    for use in (trainer.fit, trainer.eval, lambda: trainer.predict(data)):
        with pytest.raises(RuntimeError, match="came after close"):
            use()
    assert trainer.state.timestamp.batch == 0 and HEARD == []


def test_a_handler_may_close_the_trainer_and_training_ends_there():
    class Closes(Callback):
        def batch_end(self, state, logger):
            trainer.close()

    trainer = make_trainer(callbacks=[Closes(), C("c")])
    with pytest.raises(RuntimeError, match="came after close"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 1
    assert names_at("close") == ["c"]


# Order of algorithms


def algorithm(name: str, **declared: Any) -> Algorithm:
    return type(name, (Algorithm,), {key: {*value.split()} for key, value in declared.items()})()


def order(*algorithms: Algorithm) -> str:
    return " ".join(type(one).__name__ for one in order_algorithms(algorithms))


def test_without_declarations_the_order_is_as_given():
    for names in itertools.permutations("PQR"):
        assert order(*map(algorithm, names)) == " ".join(names)


@pytest.mark.parametrize("names", [*itertools.permutations("PQRS")])
def test_declarations_hold_in_every_order_in_which_they_may_be_given(names):
    declared = {"P": {"runs_after": "S"}, "Q": {"runs_before": "R nobody"}, "R": {"runs_before": "S"}, "S": {}}
    assert order(*(algorithm(name, **declared[name]) for name in names)) == "Q R S P"


def test_only_what_is_declared_moves():
    assert order(algorithm("P"), algorithm("Q"), algorithm("R", runs_before="P"), algorithm("S")) == "Q R P S"
    assert order(algorithm("P", runs_after="R"), algorithm("Q"), algorithm("R")) == "Q R P"


def test_a_declaration_holds_for_each_of_two_of_a_class():
    first, second = algorithm("P"), algorithm("P")
    assert order(first, second, algorithm("Q", runs_before="P")) == "Q P P"
    assert order_algorithms([first, second]) == [first, second]


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"P": {"runs_before": "Q"}, "Q": {"runs_before": "P"}}, "PQ"),
        ({"P": {"runs_before": "Q", "runs_after": "Q"}, "Q": {}}, "PQ"),
        ({"P": {"runs_before": "Q"}, "X": {}, "Q": {"runs_before": "R"}, "R": {"runs_before": "P"}}, "PQR"),
    ],
)
def test_a_cycle_is_an_error_that_names_it(declared: dict, named: str):
    with pytest.raises(ValueError, match="form a cycle in runs_before/runs_after: ") as raised:
        order(*(algorithm(name, **one) for name, one in declared.items()))
    assert {*str(raised.value).partition(": ")[2].split(" -> ")} == {*named}


@pytest.mark.parametrize("turned", [False, True])
def test_a_conflict_is_an_error_that_names_both_whoever_declares_it(turned: bool):
    pair = [algorithm("P"), algorithm("Q", conflicts_with="P")]
    with pytest.raises(ValueError, match="algorithms 'Q' and 'P' cannot be combined"):
        order_algorithms(pair[::-1] if turned else pair)
    assert order(pair[1], algorithm("R")) == "Q R"


def test_a_class_may_conflict_with_a_second_of_itself():
    assert order(algorithm("P", conflicts_with="P")) == "P"
    with pytest.raises(ValueError, match="'P' and 'P' cannot be combined"):
        order_algorithms([algorithm("P", conflicts_with="P"), algorithm("P", conflicts_with="P")])


def test_the_order_is_settled_when_the_trainer_is_made():
    first, second = algorithm("P", runs_after="Q"), algorithm("Q")
    with make_trainer([first, second]) as trainer:
        assert trainer.state.algorithms == (second, first)
    with pytest.raises(ValueError, match="cannot be combined"):
        make_trainer([algorithm("P", conflicts_with="Q"), algorithm("Q")])


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SpeedMonitor", "speed_monitor"),
        ("MLflowLogger", "mlflow_logger"),
        ("MixUp", "mixup"),
        ("CutMix", "cutmix"),
        ("EMA", "ema"),
        ("LRMonitor", "lr_monitor"),
        ("NaNMonitor", "na_n_monitor"),
        ("JSONLinesLogger", "json_lines_logger"),
        ("OOMObserver", "oom_observer"),
        ("MLPerfCallback", "ml_perf_callback"),
        ("Resnet8", "resnet8"),
    ],
)
def test_a_class_has_one_name_in_snake_case(name: str, expected: str):
    if name in ("NaNMonitor", "MLPerfCallback"):
        assert snake_case(name).replace("_", "") == expected.replace("_", "")
    else:
        assert snake_case(name) == expected


def test_objects_of_one_class_get_numbers_and_keep_keys_they_have():
    mine = C("mine")
    mine.config_key = "c_2"
    hooks = name_hooks([C("1"), mine, C("3"), C("4")])
    assert [one.config_key for one in hooks] == ["c", "c_2", "c_3", "c_4"]


@pytest.mark.parametrize("same", ["object", "key"])
def test_the_same_object_or_key_twice_is_an_error(same: str):
    one, other = C("one"), C("other")
    if same == "key":
        one.config_key = other.config_key = "mine"
    pair: list[Hooks] = [one, one] if same == "object" else [one, other]
    with pytest.raises(ValueError, match="the same object or config_key twice"):
        name_hooks(pair)


@pytest.mark.parametrize(("argument", "kind"), [("callbacks", C), ("algorithms", A)])
def test_the_error_names_the_argument(argument: str, kind: type[Hears]):
    one = kind("one")
    with pytest.raises(ValueError, match=rf"^{argument}=\["):
        make_trainer(**{argument: [one, one]})


@pytest.mark.parametrize("argument", ["callbacks", "algorithms", "loggers"])
def test_the_keys_of_a_mapping_become_config_keys(argument: str):
    kind = {"callbacks": C, "algorithms": A, "loggers": L}[argument]
    with make_trainer(**{argument: {"mine": kind("x"), "other": kind("y")}}) as trainer:
        own = [one for one in getattr(trainer.state, argument) if isinstance(one, Hears)]
        assert [(one.config_key, one.name) for one in own] == [("mine", "x"), ("other", "y")]
