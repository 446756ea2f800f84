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
    """The network itself, to be called and indexed."""
    return state.unwrapped_model.module


class Trace(Callback):
    def __init__(self):
        self.events: list[str] = []

    def run_event(self, event, state, logger):
        self.events.append(event.name)


def test_the_events_of_eval_and_predict():
    trace = Trace()
    data = make_data(7, 3)
    with make_trainer(trace, eval_dataloader=[Evaluator("a", data), Evaluator("b", data)]) as trainer:
        trace.events.clear()
        trainer.eval()
        batch = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
        one = ["EVAL_START", *batch * 3, "EVAL_END"]
        assert trace.events == ["EVAL_STANDALONE_START", *one, *one, "EVAL_STANDALONE_END"]
        trace.events.clear()
        trainer.predict(data)
        batch = ["PREDICT_BATCH_START", "PREDICT_BEFORE_FORWARD", "PREDICT_AFTER_FORWARD", "PREDICT_BATCH_END"]
        assert trace.events == ["PREDICT_START", *batch * 3, "PREDICT_END"]


def test_values_are_means_over_samples_also_with_an_uneven_last_batch():
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
    assert [len(one) for one in outputs] == [3, 3, 1]
    assert all(one.device.type == "cpu" and not one.requires_grad for one in outputs)
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


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one is other or torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@pytest.mark.parametrize("how", ["due", "eval", "predict"])
def test_evaluation_leaves_training_as_it_was(how: str):
    compared = []

    class Compares(Callback):
        def batch_end(self, state, logger):
            layers(state)[2].eval()  # a mode of its own, as a frozen layer has
            self.before = snapshot(state)
            if how == "eval":
                trainer.eval()
            if how == "predict":
                trainer.predict(make_data())

        def eval_batch_end(self, state, logger):
            assert not any(module.training for module in state.unwrapped_model.modules())
            assert not torch.is_grad_enabled() and state.dataloader_label == "eval"

        def batch_checkpoint(self, state, logger):
            after = snapshot(state)
            compared.append([name for name in after if not same(self.before[name], after[name])])

    with make_trainer(Compares(), max_duration="4ba", eval_interval="1ba" if how == "due" else 0) as trainer:
        trainer.fit()
        assert torch.is_grad_enabled()
    assert compared == [[]] * 4
    assert any(module.training for module in trainer.state.unwrapped_model.modules())


@pytest.mark.parametrize("fits", [True, False])
def test_all_of_training_is_back_when_an_evaluation_has_ended(fits: bool):
    """In the middle of training; and alone, before it."""
    found: list[Any] = []

    class Looks(Callback):
        def batch_end(self, state, logger):
            found.append((state.batch, state.outputs, state.dataloader, state.dataloader_label, state.dataloader_len))

        def eval_after_all(self, state, logger):
            now = (state.batch, state.outputs, state.dataloader, state.dataloader_label, state.dataloader_len)
            assert all(one is other for one, other in zip(now, found[-1], strict=True))
            assert state.model.training and torch.is_grad_enabled()
            found.append("eval_after_all")

        def eval_standalone_end(self, state, logger):
            assert not hasattr(state, "batch") and state.dataloader is state.dataloader_label is None
            assert torch.is_grad_enabled()
            found.append("eval_standalone_end")

    with make_trainer(Looks(), max_duration="1ep", eval_interval="1ba") as trainer:
        trainer.fit() if fits else trainer.eval()
    assert found[-1] == ("eval_after_all" if fits else "eval_standalone_end")


def test_evaluation_before_training_leaves_what_is_in_flight_unset():
    with make_trainer() as trainer:
        trainer.eval()
        trainer.predict(make_data())
        for name in ("batch", "microbatch", "outputs", "loss"):
            with pytest.raises(AttributeError, match=name):
                getattr(trainer.state, name)
        assert trainer.state.dataloader_label is None


class Doubles(Algorithm):
    """Evaluates with weights twice as large, as an average would replace them."""

    inside = 0

    @contextmanager
    def evaluation_weights(self, state):
        bias = layers(state)[3].bias
        with torch.no_grad():
            bias.mul_(2)
        self.inside += 1
        try:
            yield
        finally:
            with torch.no_grad():
                bias.div_(2)
            self.inside -= 1


def test_evaluation_sees_the_weights_of_algorithms_and_training_its_own():
    doubles = Doubles()
    seen: dict[str, set[int]] = {}

    class Looks(Callback):
        def run_event(self, event, state, logger):
            seen.setdefault(event.name, set()).add(doubles.inside)

    with make_trainer(Looks(), algorithms=doubles, eval_interval="1ba", max_duration="2ep") as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict(make_data())
    for event, inside in seen.items():
        is_over = event in ("EVAL_AFTER_ALL", "EVAL_STANDALONE_END")
        assert inside == ({1} if event.startswith(("EVAL", "PREDICT")) and not is_over else {0}), event


@pytest.mark.parametrize(
    "event", [e for e in Event if e.name.startswith(("EVAL", "PREDICT")) and "STANDALONE" not in e.name]
)
def test_an_error_inside_puts_weights_and_modes_back(event: Event):
    failing = event

    class Fails(Callback):
        def run_event(self, event, state, logger):
            if event is failing:
                raise ValueError("mine")

        def close(self, state, logger):
            self.inside = doubles.inside
            self.modes = {module.training for module in state.unwrapped_model.modules()}

    doubles, fails = Doubles(), Fails()
    trainer = make_trainer(fails, algorithms=doubles, eval_interval="1ba", max_duration="2ba")
    before = layers(trainer.state)[3].bias.detach().clone()
    with pytest.raises(ValueError, match="mine"):
        if event.name.startswith("PREDICT"):
            trainer.predict(make_data())
            raise AssertionError
        trainer.state.optimizers[0].param_groups[0]["lr"] = 0.0
        trainer.fit()
    assert (doubles.inside, fails.inside, fails.modes) == (0, 0, {True})
    assert torch.equal(layers(trainer.state)[3].bias, before)
    assert torch.is_grad_enabled()


def test_a_subset_of_batches():
    evaluator = Evaluator("eval", make_data(7, 3), subset_num_batches=2)
    with make_trainer(eval_dataloader=evaluator) as trainer:
        trainer.eval()
        assert (trainer.state.eval_timestamp.batch, trainer.state.eval_timestamp.sample) == (2, 6)


def test_an_evaluator_without_data_is_an_error():
    with pytest.raises(ValueError, match="dataloader of evaluator 'mine' has no batches"):
        make_trainer(eval_dataloader=Evaluator("mine", []))
    once = (batch for batch in make_data())
    trainer = make_trainer(eval_dataloader=Evaluator("mine", once), eval_interval="1ba")
    with pytest.raises(ValueError, match="evaluator 'mine' yielded no batch; an exhausted generator"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 2


@pytest.mark.parametrize("batches", [3, 2])
def test_a_loader_that_may_have_no_end_is_told(batches: int, monkeypatch: Any, caplog: Any):
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


def test_algorithms_see_the_batches_of_an_evaluation():
    class Relabels(Algorithm):
        def eval_after_forward(self, state, logger):
            state.outputs = nn.functional.one_hot(state.batch[1], 2).float()

    with make_trainer(algorithms=Relabels()) as trainer:
        assert float(trainer.eval()["eval"]["MulticlassAccuracy"]) == 1.0


def test_what_a_model_draws_depends_on_the_seed_and_the_batch_alone():
    class Noise(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.randn(len(inputs), 2)

    class Draws(Callback):
        def eval_before_forward(self, state, logger):
            torch.rand(1)

        predict_before_forward = eval_before_forward

    found = []
    for callbacks in ([], [Draws()]):
        model = ClassificationModel(Noise(), 2)
        with make_trainer(*callbacks, model=model, train_dataloader=None, optimizers=None) as trainer:
            found += [trainer.eval()["eval"]["loss"] for _ in range(2)]
            outputs = trainer.predict(make_data(7, 3))
            found.append(nn.functional.cross_entropy(torch.cat(outputs).double(), torch.arange(7) % 2))
            assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close([one.double() for one in found], [found[0].double()] * 6, rtol=1e-6, atol=0)
