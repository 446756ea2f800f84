from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import InMemoryLogger
from runner import Algorithm, Callback, ClassificationModel, Evaluator, Event, Trainer
from runner.data import TensorLoader

# Four batches an epoch, of two samples with three tokens each.
PER_EPOCH, SAMPLES, TOKENS = 4, 2, 6


class Tokens(ClassificationModel):
    """A classifier whose inputs count as tokens."""

    def num_tokens(self, batch):
        return batch[0].numel()


class Trace(Callback):
    """Notes every event of a fit, evaluations with their label."""

    def __init__(self):
        self.events: list[str] = []
        self.times: list[tuple[str, int, int, int]] = []

    def run_event(self, event, state, logger):
        name = f"EVAL_START {state.dataloader_label}" if event is Event.EVAL_START else event.name
        self.events.append(name)
        now = state.timestamp
        self.times.append((name, now.epoch, now.batch, now.batch_in_epoch))

    def at(self, name: str) -> list[tuple[int, int, int]]:
        return [entry[1:] for entry in self.times if entry[0] == name]

    def take(self) -> list[str]:
        events = self.events.copy()
        self.events.clear()
        self.times.clear()
        return events


def make_data(batches: int = PER_EPOCH) -> TensorLoader:
    inputs = torch.arange(3.0 * SAMPLES * batches).view(-1, 3) / 10
    return TensorLoader(inputs, torch.arange(SAMPLES * batches) % 2, batch_size=SAMPLES, shuffle=False)


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": Tokens(nn.Linear(3, 2), 2),
        "train_dataloader": make_data(),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "callbacks": list(callbacks),
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


class Unsized:
    """A loader that does not say how long it is."""

    def __init__(self, batches: int = PER_EPOCH):
        self.batches = batches

    def __iter__(self):
        return iter([*make_data(self.batches)])


def batch_events(microbatches: int) -> list[str]:
    micro = ["BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "BEFORE_BACKWARD", "AFTER_BACKWARD"]
    return [
        *("AFTER_DATALOADER", "BATCH_START", "BEFORE_TRAIN_BATCH"),
        *micro * microbatches,
        *("AFTER_TRAIN_BATCH", "BATCH_END"),
    ]


def evaluator_events(label: str, batches: int = 1) -> list[str]:
    batch = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
    return [f"EVAL_START {label}", *batch * batches, "EVAL_END"]


def evaluations(labels: Sequence[str]) -> list[str]:
    if not labels:
        return []
    return ["EVAL_BEFORE_ALL", *(event for label in labels for event in evaluator_events(label)), "EVAL_AFTER_ALL"]


def fit_events(
    batches: int,
    *,
    start: int = 0,
    microbatches: int = 1,
    finds_end: bool = False,
    epoch_ends: bool = True,
    iteration: int | None = None,
    at_batch: Mapping[int, Sequence[str]] = {},
    at_epoch: Mapping[int, Sequence[str]] = {},
    final: Sequence[str] = (),
) -> list[str]:
    """The events of the specification's pseudocode, for batches `start` to `batches`.

    With `finds_end` the last epoch is left by the `next()` that finds the end of the data, with `epoch_ends` its end
    is known when the last batch was its last.
    """
    events = ["FIT_START"]
    for index in range(start, batches):
        epoch, in_epoch = divmod(index, PER_EPOCH)
        if in_epoch == 0:
            if epoch % (iteration or 1000) == 0 or (start == index and not iteration):
                events += ["ITERATION_START"]
            events += ["EPOCH_START"]
        events += ["BEFORE_DATALOADER", *batch_events(microbatches)]
        events += [*evaluations(at_batch.get(index + 1, ())), "BATCH_CHECKPOINT"]
        last = index + 1 == batches
        if in_epoch + 1 == PER_EPOCH and (not last or epoch_ends):
            events += ["BEFORE_DATALOADER"] if finds_end or not last else []
            events += ["EPOCH_END", *evaluations(at_epoch.get(epoch + 1, ())), "EPOCH_CHECKPOINT"]
            if (epoch + 1) % iteration == 0 if iteration else last:
                events += ["ITERATION_END", "ITERATION_CHECKPOINT"]
    return [*events, *evaluations(final), "FIT_END"]


# The order of events


def test_one_small_run_event_by_event():
    trace = Trace()
    data = make_data(2)
    evaluation = [Evaluator("val", make_data(1), eval_interval="1ep")]
    with make_trainer(trace, train_dataloader=data, eval_dataloader=evaluation, grad_accum=2) as trainer:
        assert trace.take() == ["INIT", "BEFORE_LOAD", "AFTER_LOAD"]
        trainer.fit(duration="3ba")
    microbatches = """
        BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
        BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
    """
    evaluation_of_val = """
        EVAL_BEFORE_ALL EVAL_START val EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
        EVAL_AFTER_ALL
    """
    assert (
        " ".join(trace.events).split()
        == f"""
        FIT_START ITERATION_START EPOCH_START
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH {microbatches}
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH {microbatches}
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        BEFORE_DATALOADER
        EPOCH_END {evaluation_of_val} EPOCH_CHECKPOINT
        EPOCH_START
        BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH {microbatches}
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT
        {evaluation_of_val} FIT_END
    """.split()
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("duration", "batches"),
    [
        ("1ba", 1),
        ("6ba", 6),
        ("12sp", 6),
        ("11sp", 6),
        ("36tok", 6),
        ("31tok", 6),
        ("4ba", 4),
        ("8ba", 8),
        ("16sp", 8),
        ("15sp", 8),
        ("48tok", 8),
        ("1ep", 4),
        ("2ep", 8),
    ],
)
def test_the_order_of_events(duration: str, batches: int, microbatches: int):
    trace = Trace()
    data = TensorLoader(torch.ones(16, 3), torch.zeros(16, dtype=torch.long), batch_size=4, shuffle=False)
    if duration.endswith(("sp", "tok")):
        count, unit = int(duration.rstrip("sptok")), duration.lstrip("0123456789")
        duration = f"{2 * count}{unit}"  # batches of four here, so that there can be four microbatches
    with make_trainer(trace, train_dataloader=data, max_duration=duration, grad_accum=microbatches) as trainer:
        trace.take()
        trainer.fit()
    finds_end = duration.endswith("ep")
    assert trace.events == fit_events(batches, microbatches=microbatches, finds_end=finds_end)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("batches", [6, 8])
def test_the_order_of_events_when_the_clock_ends_the_run(batches: int, microbatches: int):
    class Slow(Callback):
        def before_train_batch(self, state, logger):
            if state.timestamp.batch == batches - 1:
                time.sleep(1.01)

    trace = Trace()
    data = TensorLoader(torch.ones(16, 3), torch.zeros(16, dtype=torch.long), batch_size=4, shuffle=False)
    arguments = {"train_dataloader": data, "max_duration": "1s", "microbatch_size": 4 // microbatches}
    with make_trainer(trace, Slow(), **arguments) as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(batches, microbatches=microbatches)
    assert trainer.state.timestamp.total_wct == pytest.approx(1.01)


@pytest.mark.parametrize(("duration", "batches"), [("6ba", 6), ("8ba", 8), ("2ep", 8), ("16sp", 8), ("9ba", 9)])
def test_the_order_of_events_when_the_loader_has_no_length(duration: str, batches: int):
    trace = Trace()
    with make_trainer(trace, train_dataloader=Unsized(), max_duration=duration) as trainer:
        trace.take()
        trainer.fit()
        assert trainer.state.train_dataloader_len is None
    in_epochs = duration.endswith("ep")
    assert trace.events == fit_events(batches, finds_end=in_epochs, epoch_ends=in_epochs)


def test_without_a_length_an_epoch_that_the_run_ended_with_ends_in_the_next_fit():
    trace = Trace()
    with make_trainer(trace, train_dataloader=Unsized(), max_duration="4ba") as trainer:
        trainer.fit()
        assert "EPOCH_END" not in trace.take()
        trainer.fit(duration="1ba")
    assert trace.events[:5] == ["FIT_START", "BEFORE_DATALOADER", "EPOCH_END", "EPOCH_CHECKPOINT", "EPOCH_START"]
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == (1, 5)


def test_a_loader_that_is_its_own_iterator_loses_no_batch_when_fit_goes_on():
    class Batches(Callback):
        def __init__(self):
            self.first: list[float] = []

        def batch_start(self, state, logger):
            self.first.append(round(float(state.batch[0][0, 0]), 1))

    seen = Batches()
    with make_trainer(seen, train_dataloader=iter([*make_data(6)]), max_duration="2ba") as trainer:
        trainer.fit()
        trainer.fit(duration="3ba")
    assert seen.first == [0.0, 0.6, 1.2, 1.8, 2.4]


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_iterations(iteration: int):
    trace = Trace()
    with make_trainer(trace, max_duration="4ep", iteration_length=f"{iteration}ep") as trainer:
        trace.take()
        trainer.fit()
        now = trainer.state.timestamp
    assert trace.events == fit_events(16, finds_end=True, iteration=iteration)
    assert (now.iteration, now.epoch_in_iteration) == divmod(4, iteration)


def test_what_the_timestamp_says_at_each_event():
    trace = Trace()
    with make_trainer(trace, max_duration="2ep") as trainer:
        trainer.fit()
    each = [(epoch, 4 * epoch + i, i) for epoch in range(2) for i in range(4)]
    assert trace.at("BATCH_START") == trace.at("AFTER_TRAIN_BATCH") == each
    after = [(epoch, batch + 1, i + 1) for epoch, batch, i in each]
    assert trace.at("BATCH_END") == trace.at("BATCH_CHECKPOINT") == after, "BATCH_END counts its batch"
    assert trace.at("EPOCH_END") == trace.at("EPOCH_CHECKPOINT") == [(1, 4, 0), (2, 8, 0)]
    assert trace.at("FIT_END") == [(2, 8, 0)]


def test_a_batch_counts_samples_tokens_and_seconds():
    with make_trainer(max_duration="6ba") as trainer:
        started = time.perf_counter()
        trainer.fit()
        passed = time.perf_counter() - started
    now = trainer.state.timestamp
    assert (now.sample, now.token, now.sample_in_epoch, now.token_in_epoch) == (12, 36, 4, 12)
    assert 0 < now.batch_wct <= now.epoch_wct <= now.total_wct <= passed


# Going on, and stopping


@pytest.mark.parametrize(
    ("first", "then", "total"), [("3ba", "3ba", 6), ("4ba", "5ba", 9), ("1ep", "1ep", 8), ("6sp", "1ep", 4)]
)
def test_fit_goes_on_where_it_was(first: str, then: str, total: int):
    trace = Trace()
    with make_trainer(trace, max_duration=first) as trainer:
        trainer.fit()
        trained = trainer.state.timestamp.batch
        trace.take()
        trainer.fit(duration=then)
    assert trace.events == fit_events(total, start=trained, finds_end=then.endswith("ep"))


def test_two_fits_train_what_one_does():
    def weights(*durations: str) -> list[torch.Tensor]:
        with make_trainer() as trainer:
            for duration in durations:
                trainer.fit(duration=duration)
        return [one.detach() for one in trainer.state.unwrapped_model.parameters()]

    whole = weights("9ba")
    for parts in (("4ba", "5ba"), ("1ba", "1ba", "7ba"), ("1ep", "1ep", "2sp")):
        for one, other in zip(weights(*parts), whole, strict=True):
            assert torch.equal(one, other), parts


def test_nothing_left_to_train_is_an_error_and_the_trainer_goes_on():
    with make_trainer(max_duration="2ba") as trainer:
        trainer.fit()
        with pytest.raises(ValueError, match="max_duration='2ba' is reached: nothing is left to train"):
            trainer.fit()
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch == 3


class Stops(Callback):
    """Asks for the end of training at one event, the first or the n-th time it fires."""

    def __init__(self, event: Event, nth: int = 1):
        self.event, self.nth = event, nth

    def run_event(self, event, state, logger):
        if event is self.event:
            self.nth -= 1
            if self.nth == 0:
                state.stop_training()


def stopped(event: Event, nth: int = 1) -> tuple[Trainer, list[str]]:
    trace = Trace()
    evaluator = Evaluator("eval", make_data(1), eval_interval="1ba")
    trainer = make_trainer(trace, Stops(event, nth), max_duration="5ep", eval_dataloader=evaluator)
    with trainer:
        trace.take()
        trainer.fit()
    return trainer, trace.events


@pytest.mark.parametrize("event", [event for event in Event if not event.name.startswith(("PREDICT", "INIT"))])
def test_a_stop_asked_for_at_any_event_ends_training_in_order(event: Event):
    trainer, events = stopped(event)
    at_batch = {index: ["eval"] for index in range(1, 21)}
    if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END):
        assert trainer.state.timestamp.epoch == 5, "asked for before fit, or never"
    elif event is Event.FIT_START:
        assert events == ["FIT_START", *evaluations(["eval"]), "FIT_END"]
    elif event in (Event.ITERATION_END, Event.ITERATION_CHECKPOINT, Event.FIT_END):
        assert trainer.state.timestamp.epoch == 5, "the whole run is one iteration"
    elif event in (Event.EPOCH_END, Event.EPOCH_CHECKPOINT):
        assert events == fit_events(4, finds_end=True, at_batch=at_batch)
    else:
        assert events == fit_events(1, at_batch=at_batch)


@pytest.mark.parametrize("event", [Event.BEFORE_FORWARD, Event.BATCH_END, Event.EVAL_END, Event.BATCH_CHECKPOINT])
def test_a_stop_in_the_last_batch_of_an_epoch_ends_the_epoch(event: Event):
    at_batch = {index: ["eval"] for index in range(1, 21)}
    assert stopped(event, nth=4)[1] == fit_events(4, at_batch=at_batch)
    assert stopped(event, nth=6)[1] == fit_events(6, at_batch=at_batch)


def test_a_stop_at_the_end_of_an_iteration_ends_the_run():
    trace = Trace()
    stops = Stops(Event.ITERATION_END, nth=2)
    with make_trainer(trace, stops, max_duration="9ep", iteration_length="1ep") as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(8, finds_end=True, iteration=1)


def test_fit_goes_on_after_a_stop():
    with make_trainer(Stops(Event.BATCH_END), max_duration="5ba") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 1 and trainer.state.stop_requested
        trainer.fit()
        assert trainer.state.timestamp.batch == 5 and not trainer.state.stop_requested


# Evaluation during training


@pytest.mark.parametrize(
    ("interval", "duration", "at_batch", "at_epoch", "final"),
    [
        ("1ep", "2ep", [], [1, 2], False),
        ("2ep", "3ep", [], [2], True),
        ("1ep", "6ba", [], [1], True),
        ("1ep", "8ba", [], [1, 2], False),
        ("2ba", "2ep", [2, 4, 6, 8], [], False),
        ("3ba", "2ep", [3, 6], [], True),
        ("4ba", "8ba", [4, 8], [], False),
        ("100ba", "5ba", [], [], True),
        ("6sp", "2ep", [3, 6], [], True),
        ("12tok", "4ba", [2, 4], [], False),
        ("0.5dur", "2ep", [], [1, 2], False),
        ("0.25dur", "8ba", [2, 4, 6, 8], [], False),
        ("0.25dur", "10ba", [3, 5, 8, 10], [], False),
        ("0.3dur", "10ba", [3, 6, 9], [], True),
        ("1dur", "6ba", [6], [], False),
        ("1dur", "2ep", [], [2], False),
        (2, "2ep", [], [2], False),
        (0, "2ep", [], [], False),
        ("0ba", "2ep", [], [], False),
    ],
)
@pytest.mark.parametrize("of", ["trainer", "evaluator"])
def test_when_evaluations_run(interval, duration: str, at_batch: list, at_epoch: list, final: bool, of: str):
    trace = Trace()
    if of == "trainer":
        arguments: dict[str, Any] = {"eval_interval": interval, "eval_dataloader": make_data(1)}
    else:
        arguments = {"eval_interval": "1ba", "eval_dataloader": Evaluator("eval", make_data(1), None, interval)}
    with make_trainer(trace, max_duration=duration, **arguments) as trainer:
        trace.take()
        trainer.fit()
    batches = {"ba": int(duration[:-2]), "ep": 4 * int(duration[:-2])}[duration[-2:]]
    assert trace.events == fit_events(
        batches,
        finds_end=duration.endswith("ep"),
        at_batch={batch: ["eval"] for batch in at_batch},
        at_epoch={epoch: ["eval"] for epoch in at_epoch},
        final=["eval"] if final else [],
    )


def test_two_evaluators_run_in_their_order_each_at_its_interval():
    trace = Trace()
    evaluators = [Evaluator("first", make_data(1), eval_interval="3ba"), Evaluator("second", make_data(1))]
    with make_trainer(trace, eval_dataloader=evaluators, eval_interval="2ba", max_duration="7ba") as trainer:
        trace.take()
        trainer.fit()
    at_batch = {2: ["second"], 3: ["first"], 4: ["second"], 6: ["first", "second"]}
    assert trace.events == fit_events(7, at_batch=at_batch, final=["first", "second"])


def test_the_final_evaluation_is_of_those_that_have_not_run_at_this_batch():
    trace = Trace()
    evaluators = [
        Evaluator("due", make_data(1), eval_interval="2ba"),
        Evaluator("owed", make_data(1), eval_interval="1ep"),
        Evaluator("off", make_data(1), eval_interval=0),
    ]
    with make_trainer(trace, eval_dataloader=evaluators, max_duration="2ba") as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(2, at_batch={2: ["due"]}, final=["owed"])


@pytest.mark.usefixtures("steady")
def test_an_interval_in_seconds():
    class Slow(Callback):
        def before_forward(self, state, logger):
            if state.timestamp.batch in (2, 5):
                time.sleep(0.6)

    trace = Trace()
    evaluator = Evaluator("eval", make_data(1), eval_interval="0.5s")
    with make_trainer(trace, Slow(), eval_dataloader=evaluator, max_duration="8ba") as trainer:
        trainer.fit()
    evaluated = [batch for _, batch, _ in trace.at("EVAL_START eval")]
    assert evaluated == [3, 6, 8]


def test_the_last_evaluation_of_one_trainer_is_not_taken_for_that_of_the_next():
    evaluator = Evaluator("eval", make_data(1), eval_interval="100ba")
    for _ in range(2):
        trace = Trace()
        with make_trainer(trace, eval_dataloader=evaluator, max_duration="3ba") as trainer:
            trainer.fit()
        assert trace.at("EVAL_START eval") == [(0, 3, 3)]


# Time


@pytest.mark.usefixtures("steady")
def test_evaluation_and_what_lies_between_fits_is_not_training_time():
    class Slow(Callback):
        def eval_start(self, state, logger):
            time.sleep(0.3)

        def batch_start(self, state, logger):
            time.sleep(0.1)

    with make_trainer(Slow(), eval_dataloader=make_data(1), eval_interval="1ba") as trainer:
        time.sleep(0.3)
        trainer.eval()
        trainer.fit(duration="2ba")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.2)
        time.sleep(0.3)
        trainer.eval()
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)


@pytest.mark.usefixtures("steady")
def test_what_callbacks_take_before_an_evaluation_is_training_time():
    class Slow(Callback):
        def batch_end(self, state, logger):
            time.sleep(0.1)

    with make_trainer(Slow(), eval_dataloader=make_data(1), eval_interval="1ba", max_duration="4ba") as trainer:
        trainer.fit()
        # The last batch's is in no batch after it.
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)


class SlowBatches(Callback):
    def batch_end(self, state, logger):
        time.sleep(0.02)


@pytest.mark.usefixtures("steady")
def test_a_wall_clock_duration_ends_training_in_time():
    with make_trainer(SlowBatches(), max_duration="0.29s") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.total_wct == pytest.approx(0.3)
        assert trainer.state.timestamp.batch == 16, "what follows BATCH_END counts with the batch after it"
        assert trainer.state.get_elapsed_duration() == "1dur"
        trainer.fit(duration="0.09s")
        assert trainer.state.timestamp.total_wct == pytest.approx(0.4)


def test_a_wall_clock_duration_is_one_of_a_real_clock():
    with make_trainer(SlowBatches(), max_duration="0.3s") as trainer:
        started = time.perf_counter()
        trainer.fit()
        assert 0.3 <= trainer.state.timestamp.total_wct <= time.perf_counter() - started < 20
        assert 1 < trainer.state.timestamp.batch <= 16


# Data


def test_a_loader_that_runs_dry_is_an_error():
    used_up = (batch for batch in make_data(2))
    with pytest.raises(ValueError, match="train_dataloader yielded no batch in this epoch") as raised:
        make_trainer(train_dataloader=used_up, max_duration="2ep").fit()
    assert raised.value.__context__ is None


def test_a_loader_without_batches_is_an_error_at_once():
    dataset = torch.utils.data.TensorDataset(torch.ones(3, 3), torch.zeros(3, dtype=torch.long))
    for loader in ([], torch.utils.data.DataLoader(dataset, batch_size=4, drop_last=True)):
        with pytest.raises(ValueError, match="train_dataloader has no batches.*drop_last"):
            make_trainer(train_dataloader=loader)


@pytest.mark.parametrize(
    ("batch", "named"),
    [(object(), "object"), ((torch.ones(2, 3), {1, 2}), "set"), ({"x": torch.ones(2).numpy()}, "ndarray")],
)
def test_a_batch_of_unknown_type_is_one_clear_error(batch, named: str):
    with pytest.raises(TypeError, match=f"a batch holds a {named}; it must be a tensor") as raised:
        make_trainer(train_dataloader=[batch]).fit()
    assert raised.value.__context__ is None and raised.value.__cause__ is None


def test_a_batch_without_tensors_is_one_clear_error():
    with pytest.raises(TypeError, match="cannot count the samples of a batch of type list"):
        make_trainer(train_dataloader=[["text", 1]]).fit()


def test_data_that_is_not_a_number_is_trained_on_and_logged_as_it_is():
    inputs = torch.ones(8, 3)
    inputs[2:] = float("nan")
    data = TensorLoader(inputs, torch.zeros(8, dtype=torch.long), batch_size=2, shuffle=False)
    memory = InMemoryLogger()
    arguments = {"train_dataloader": data, "eval_dataloader": data, "loggers": memory, "max_duration": "2ep"}
    with make_trainer(**arguments) as trainer:
        trainer.fit()
    losses = [value for _, value in memory.data["loss/train/total"]]
    assert losses[0] == losses[0] and all(value != value for value in losses[1:]) and len(losses) == 8
    assert memory.data["loss/eval/total"][-1][1] != memory.data["loss/eval/total"][-1][1]
    assert trainer.state.timestamp.epoch == 2


def test_what_is_in_flight_is_unset_before_it_exists():
    seen: list[dict[str, bool]] = []

    class Looks(Callback):
        def run_event(self, event, state, logger):
            if event in (Event.FIT_START, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_FORWARD):
                names = ("batch", "microbatch", "outputs", "loss", "total_loss")
                seen.append({name: hasattr(state, name) for name in names})

    with make_trainer(Looks(), max_duration="1ba") as trainer:
        with pytest.raises(AttributeError, match="batch"):
            _ = trainer.state.batch
        trainer.fit()
    assert [sum(one.values()) for one in seen] == [0, 1, 2, 3]


def test_one_microbatch_is_the_batch_itself_and_several_are_views_of_it():
    starts: list[int] = []

    class Looks(Callback):
        def before_forward(self, state, logger):
            batch, microbatch = state.batch[0], state.microbatch[0]
            if state.grad_accum == 1:
                assert state.microbatch is state.batch
            assert microbatch.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
            assert torch.equal(microbatch, batch[state.microbatch_start : state.microbatch_start + len(microbatch)])
            starts.append(state.microbatch_start)

    for grad_accum in (1, 2):
        with make_trainer(Looks(), max_duration="1ba", grad_accum=grad_accum) as trainer:
            trainer.fit()
    assert starts == [0, 0, 1]


class _NoRoomBackward(torch.autograd.Function):
    """Passes one sample through; of more, the gradient has no room in memory."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if len(gradients[0]) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return gradients[0]


def test_nothing_of_an_attempt_that_ran_out_of_memory_is_kept_while_the_next_one_runs():
    class Lean(Tokens):
        def forward(self, batch):
            return _NoRoomBackward.apply(super().forward(batch))

    class Watch(Callback):
        def __init__(self):
            self.computed: list[weakref.ref[torch.Tensor]] = []
            self.alive: list[bool] = []

        def before_forward(self, state, logger):
            if state.microbatch_start == 0:
                self.alive.append(any(one() is not None for one in self.computed))
                self.computed = []

        def before_backward(self, state, logger):
            self.computed += [weakref.ref(state.outputs), weakref.ref(state.loss)]

    watch = Watch()
    with make_trainer(watch, model=Lean(nn.Linear(3, 2), 2), microbatch_size="auto", max_duration="1ba") as trainer:
        trainer.fit()
    assert trainer.state.microbatch_size == 1
    assert watch.alive == [False, False]


def test_algorithms_may_change_batch_loss_and_gradients():
    class Changes(Algorithm):
        def after_dataloader(self, state, logger):
            state.batch = (state.batch[0] * 0, state.batch[1])

        def after_loss(self, state, logger):
            assert isinstance(state.loss, torch.Tensor)
            state.loss = state.loss * 2

        def after_train_batch(self, state, logger):
            self.gradients = [p.grad.clone() for p in state.unwrapped_model.parameters() if p.grad is not None]

    for grad_accum in (1, 2):
        changes = Changes()
        with make_trainer(max_duration="1ba", algorithms=[changes], grad_accum=grad_accum) as trainer:
            _, bias = (one.detach().clone() for one in trainer.state.unwrapped_model.parameters())
            trainer.fit()
        weight_gradient, bias_gradient = changes.gradients
        assert not weight_gradient.any(), "inputs of zero"
        torch.testing.assert_close(bias_gradient, 2 * (torch.softmax(bias, 0) - torch.tensor([0.5, 0.5])))
