"""Evaluation and prediction: their events and values, and that they leave the state of training unchanged."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel, Evaluator, Event, State, Trainer
from runner.callbacks import InMemoryLogger
from runner.data import TensorLoader
from runner.failures import checks
from runner.training.evaluation import _IN_FLIGHT


def make_model() -> ClassificationModel:
    torch.manual_seed(0)
    return ClassificationModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)), 2)


def make_data(samples: int = 10, batch_size: int = 4) -> TensorLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 3, generator=generator)
    return TensorLoader(inputs, torch.arange(samples) % 2, batch_size=batch_size, shuffle=False)


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": make_model(),
        "train_dataloader": make_data(),
        "eval_dataloader": make_data(7, 3),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "callbacks": list(callbacks),
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def layers(state: State) -> Any:
    """Return the network inside the model, with a type that can be called and indexed."""
    return state.unwrapped_model.module


class Trace(Callback):
    def __init__(self):
        self.events: list[str] = []

    def run_event(self, event, state, logger):
        self.events.append(event.name)


def test_eval_and_predict_fire_their_events_in_order():
    trace = Trace()
    data = make_data(7, 3)
    with make_trainer(trace, eval_dataloader=[Evaluator("a", data), Evaluator("b", data)]) as trainer:
        trace.events.clear()
        trainer.eval()
        batch = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
        evaluator = ["EVAL_START", *batch * 3, "EVAL_END"]
        assert trace.events == ["EVAL_STANDALONE_START", *evaluator * 2, "EVAL_STANDALONE_END"]
        trace.events.clear()
        trainer.predict(data)
        batch = ["PREDICT_BATCH_START", "PREDICT_BEFORE_FORWARD", "PREDICT_AFTER_FORWARD", "PREDICT_BATCH_END"]
        assert trace.events == ["PREDICT_START", *batch * 3, "PREDICT_END"]


def test_loss_and_accuracy_are_means_over_samples_even_if_the_last_batch_is_smaller():
    memory = InMemoryLogger()
    with make_trainer(loggers=memory) as trainer:
        values = trainer.eval()["eval"]
        model = layers(trainer.state).eval()
        inputs, targets = (torch.cat(parts) for parts in zip(*make_data(7, 3), strict=True))
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets).detach()
    assert float(values["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert float(values["MulticlassAccuracy"]) == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert memory.data["loss/eval/total"][0][1] == pytest.approx(float(loss), rel=1e-6)
    assert memory.data["metrics/eval/MulticlassAccuracy"][0][0].batch == 0


def test_predictions_are_the_outputs_in_order_on_the_cpu():
    with make_trainer() as trainer:
        outputs = trainer.predict(make_data(7, 3))
        expected = layers(trainer.state).eval()(torch.cat([inputs for inputs, _ in make_data(7, 3)]))
    assert [len(output) for output in outputs] == [3, 3, 1]
    assert all(output.device.type == "cpu" and not output.requires_grad for output in outputs)
    torch.testing.assert_close(torch.cat(outputs), expected)


def snapshot(state) -> dict[str, Any]:
    model = state.unwrapped_model
    return {
        "modes": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "weights": [value.clone() for value in model.state_dict().values()],
        "batch": state.batch,
        **{name: getattr(state, name, None) for name in _IN_FLIGHT},
        "total_loss": state.total_loss,
        "timestamp": state.timestamp,
        "previous": state.previous_timestamp,
    }


def is_equal(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return before is after or torch.equal(before, after)
    if isinstance(before, list):
        return len(before) == len(after) and all(map(is_equal, before, after))
    return before is after or before == after


@pytest.mark.parametrize("kind", ["interval", "eval", "predict"])
def test_evaluation_leaves_the_state_of_training_unchanged(kind: str):
    changes = []

    class Compares(Callback):
        def batch_end(self, state, logger):
            layers(state)[2].eval()  # as for a frozen layer
            self.before = snapshot(state)
            if kind == "eval":
                trainer.eval()
            if kind == "predict":
                trainer.predict(make_data())

        def eval_batch_end(self, state, logger):
            assert not any(module.training for module in state.unwrapped_model.modules())
            assert not torch.is_grad_enabled() and state.dataloader_label == "eval"

        def batch_checkpoint(self, state, logger):
            after = snapshot(state)
            changes.append([name for name in after if not is_equal(self.before[name], after[name])])

    with make_trainer(Compares(), max_duration="4ba", eval_interval="1ba" if kind == "interval" else 0) as trainer:
        trainer.fit()
        assert torch.is_grad_enabled()
    assert changes == [[]] * 4
    assert any(module.training for module in trainer.state.unwrapped_model.modules())


@pytest.mark.parametrize("fits", [True, False])
def test_the_state_of_training_is_restored_before_the_event_after_an_evaluation(fits: bool):
    last: list[Any] = []

    def attributes(state: State) -> list[Any]:
        return [state.batch, state.outputs, state.dataloader, state.dataloader_label, state.dataloader_len]

    class Compares(Callback):
        def batch_end(self, state, logger):
            last[:] = attributes(state)

        def eval_after_all(self, state, logger):
            assert all(after is before for after, before in zip(attributes(state), last, strict=True))
            assert state.model.training and torch.is_grad_enabled()
            last[:] = ["eval_after_all"]

        def eval_standalone_end(self, state, logger):
            assert not hasattr(state, "batch") and state.dataloader is state.dataloader_label is None
            assert torch.is_grad_enabled()
            last[:] = ["eval_standalone_end"]

    with make_trainer(Compares(), max_duration="1ep", eval_interval="1ba") as trainer:
        trainer.fit() if fits else trainer.eval()
    assert last == ["eval_after_all" if fits else "eval_standalone_end"]


def test_evaluation_before_training_leaves_batch_outputs_and_loss_unset():
    with make_trainer() as trainer:
        trainer.eval()
        trainer.predict(make_data())
        for name in ("batch", "microbatch", "outputs", "loss"):
            with pytest.raises(AttributeError, match=name):
                getattr(trainer.state, name)
        assert trainer.state.dataloader_label is None


class DoublesBias(Algorithm):
    """Evaluates with a bias twice as large, and counts the evaluations that have not restored it."""

    active = 0

    @contextmanager
    def evaluation_weights(self, state):
        bias = layers(state)[3].bias
        with torch.no_grad():
            bias.mul_(2)
        self.active += 1
        try:
            yield
        finally:
            with torch.no_grad():
                bias.div_(2)
            self.active -= 1


def test_only_evaluation_and_prediction_use_the_evaluation_weights_of_algorithms():
    algorithm = DoublesBias()
    active: dict[str, set[int]] = {}

    class RecordsActive(Callback):
        def run_event(self, event, state, logger):
            active.setdefault(event.name, set()).add(algorithm.active)

    with make_trainer(RecordsActive(), algorithms=algorithm, eval_interval="1ba", max_duration="2ba") as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict(make_data())
    for event, counts in active.items():
        is_over = event in ("EVAL_AFTER_ALL", "EVAL_STANDALONE_END")
        assert counts == ({1} if event.startswith(("EVAL", "PREDICT")) and not is_over else {0}), event


@pytest.mark.parametrize(
    "event", [event for event in Event if event.name.startswith(("EVAL", "PREDICT")) and "STANDALONE" not in event.name]
)
def test_weights_and_modes_are_restored_after_an_error_in_an_evaluation(event: Event):
    failing = event

    class Fails(Callback):
        def run_event(self, event, state, logger):
            if event is failing:
                raise ValueError("mine")

        def close(self, state, logger):
            self.active = algorithm.active
            self.modes = {module.training for module in state.unwrapped_model.modules()}

    algorithm, callback = DoublesBias(), Fails()
    trainer = make_trainer(callback, algorithms=algorithm, eval_interval="1ba", max_duration="2ba")
    before = layers(trainer.state)[3].bias.detach().clone()
    with pytest.raises(ValueError, match="mine"):
        if event.name.startswith("PREDICT"):
            trainer.predict(make_data())
            raise AssertionError
        trainer.state.optimizers[0].param_groups[0]["lr"] = 0.0
        trainer.fit()
    assert (algorithm.active, callback.active, callback.modes) == (0, 0, {True})
    assert torch.equal(layers(trainer.state)[3].bias, before)
    assert torch.is_grad_enabled()


def test_an_evaluator_can_read_a_subset_of_its_batches():
    evaluator = Evaluator("eval", make_data(7, 3), subset_num_batches=2)
    with make_trainer(eval_dataloader=evaluator) as trainer:
        trainer.eval()
        assert (trainer.state.eval_timestamp.batch, trainer.state.eval_timestamp.sample) == (2, 6)


def test_an_evaluator_without_data_is_an_error():
    with pytest.raises(ValueError, match="dataloader of evaluator 'mine' has no batches"):
        make_trainer(eval_dataloader=Evaluator("mine", []))
    generator = (batch for batch in make_data())
    trainer = make_trainer(eval_dataloader=Evaluator("mine", generator), eval_interval="1ba")
    with pytest.raises(ValueError, match="evaluator 'mine' yielded no batch; an exhausted generator"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 2


@pytest.mark.parametrize("batches", [3, 2])
def test_many_batches_from_a_loader_without_a_length_cause_a_warning(batches: int, monkeypatch: Any, caplog: Any):
    monkeypatch.setattr(checks, "MANY", 3)
    endless = itertools.chain(make_data(4 * batches))  # without a length
    with make_trainer(eval_dataloader=Evaluator("mine", endless), eval_interval=0) as trainer:
        trainer.eval()
    message = "dataloader of evaluator 'mine': 3 batches so far; subset_num_batches limits an endless loader"
    assert caplog.messages == [message] * (batches == 3)


def test_evaluating_other_data_does_not_change_what_training_evaluates():
    zeros, ones = ([(torch.ones(2, 3), torch.full((2,), value))] for value in (0, 1))
    model = make_model()
    model.get_parameter("module.3.bias").data = torch.tensor([9.0, -9.0])
    arguments = {"model": model, "optimizers": lambda p: torch.optim.SGD(p, lr=0.0), "max_duration": "1ba"}
    with make_trainer(eval_dataloader=zeros, eval_interval="1ba", **arguments) as trainer:
        assert float(trainer.eval(ones)["eval"]["MulticlassAccuracy"]) == 0.0
        assert float(trainer.eval(Evaluator("eval", ones, []))["eval"]["loss"]) > 5
        assert float(trainer.eval()["eval"]["MulticlassAccuracy"]) == 1.0
        trainer.eval(ones)
        trainer.fit()
        assert float(trainer.state.eval_metric_values["eval"]["MulticlassAccuracy"]) == 1.0


def test_eval_without_data_is_an_error():
    with make_trainer(eval_dataloader=None) as trainer, pytest.raises(ValueError, match="eval_dataloader=None"):
        trainer.eval()


def test_an_algorithm_can_replace_the_outputs_of_an_evaluation():
    class Relabels(Algorithm):
        def eval_after_forward(self, state, logger):
            state.outputs = nn.functional.one_hot(state.batch[1], 2).float()

    with make_trainer(algorithms=Relabels()) as trainer:
        assert float(trainer.eval()["eval"]["MulticlassAccuracy"]) == 1.0


def test_random_numbers_of_a_model_in_evaluation_depend_on_seed_and_batch_alone():
    class Noise(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.randn(len(inputs), 2)

    class Draws(Callback):
        def eval_before_forward(self, state, logger):
            torch.rand(1)

        predict_before_forward = eval_before_forward

    losses = []
    for callbacks in ([], [Draws()]):
        model = ClassificationModel(Noise(), 2)
        with make_trainer(*callbacks, model=model, train_dataloader=None, optimizers=None) as trainer:
            losses += [trainer.eval()["eval"]["loss"].double() for _ in range(2)]
            outputs = trainer.predict(make_data(7, 3))
            losses.append(nn.functional.cross_entropy(torch.cat(outputs).double(), torch.arange(7) % 2))
            assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(losses, losses[:1] * 6, rtol=1e-6, atol=0)
