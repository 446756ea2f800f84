from __future__ import annotations

import copy

import pytest
import torch
from observers import History, averaged, warnings_of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runner import Callback, evaluation_weights, save_checkpoint
from runner.algorithms import EMA
from runner.algorithms.ema import smoothing_of, update_average
from runner.checkpoints.files import read_file


class Reference(Callback):
    """Averages the weights with torch's EMA, from FIT_START on and after each batch."""

    def __init__(self, smoothing: float):
        self.smoothing = smoothing

    def fit_start(self, state, logger):
        average = get_ema_multi_avg_fn(self.smoothing)
        self.average = AveragedModel(state.unwrapped_model, multi_avg_fn=average, use_buffers=False)
        self.average.update_parameters(state.unwrapped_model)

    def batch_end(self, state, logger):
        self.average.update_parameters(state.unwrapped_model)


def fold(first, later, smoothing: float) -> dict[str, torch.Tensor]:
    """Return the average of the floating-point tensors by its recurrence."""
    average = {name: value for name, value in first.items() if value.is_floating_point()}
    for values in later:
        average = {name: smoothing * old + (1 - smoothing) * values[name] for name, old in average.items()}
    return average


def floating(values) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if value.is_floating_point()}


@pytest.mark.parametrize("grad_accum", [1, 4])
def test_parameters_are_averaged_as_torch_does(make_trainer, grad_accum: int):
    reference = Reference(smoothing_of(5))
    with make_trainer(EMA("5ba"), callbacks=[reference], grad_accum=grad_accum) as trainer:
        trainer.fit()
        average = averaged(trainer)
    torch.testing.assert_close(average, dict(reference.average.module.state_dict()), rtol=0, atol=0)


def test_floating_buffers_are_averaged_and_others_copied(make_trainer):
    history = History()
    with make_trainer(EMA(None, smoothing=0.8), callbacks=[history], batch_norm=True) as trainer:
        trainer.fit()
        average = averaged(trainer)
    torch.testing.assert_close(floating(average), fold(history.initial, history.after_batch, 0.8))
    assert int(average["module.2.num_batches_tracked"]) == 6


@pytest.mark.parametrize(
    ("arguments", "updates", "smoothing"),
    [
        ({"half_life": "4ba", "update_interval": "2ba"}, [1, 3, 5], 2**-0.5),
        ({"half_life": "1ep"}, [2, 5], 0.5),
        ({"half_life": "2ep", "update_interval": "2ep"}, [5], 0.5),
    ],
)
def test_the_average_is_updated_at_its_interval(make_trainer, arguments: dict, updates: list[int], smoothing: float):
    history = History()
    with make_trainer(EMA(**arguments), callbacks=[history], max_duration="2ep") as trainer:
        trainer.fit()
        average = averaged(trainer)
    torch.testing.assert_close(average, fold(history.initial, [history.after_batch[i] for i in updates], smoothing))


@pytest.mark.parametrize("start", ["3ba", "0.5dur", "1ep"])
def test_averaging_starts_from_the_weights_at_start(make_trainer, start: str):
    history = History()
    with make_trainer(EMA("2ba", start=start), callbacks=[history]) as trainer:
        trainer.fit()
        average = averaged(trainer)
    torch.testing.assert_close(average, fold(history.after_batch[2], history.after_batch[3:], 2**-0.5))


def test_training_is_the_same_with_and_without_ema(make_trainer):
    with make_trainer() as without, make_trainer(EMA("2ba")) as with_ema:
        without.fit()
        with_ema.fit()
    weights = [dict(trainer.state.unwrapped_model.state_dict()) for trainer in (with_ema, without)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_evaluations_see_the_average(make_trainer):
    with make_trainer(EMA("2ba")) as trainer:
        trainer.fit()
        values = trainer.eval()
        weights = averaged(trainer)
    with make_trainer() as untrained:
        initial = untrained.eval()["eval"]["loss"].clone()
        untrained.state.unwrapped_model.load_state_dict(weights)
        torch.testing.assert_close(values, untrained.eval())
    assert not torch.equal(values["eval"]["loss"], initial)


def test_trained_weights_are_restored_after_an_error(make_trainer):
    with make_trainer(EMA("2ba")) as trainer:
        trainer.fit()
        model = trainer.state.unwrapped_model
        before = copy.deepcopy(model.state_dict())
        storage = [parameter.data_ptr() for parameter in model.parameters()]
        average: dict[str, torch.Tensor] = {}
        with pytest.raises(RuntimeError, match="inside"), evaluation_weights(trainer.state):
            average = copy.deepcopy(model.state_dict())
            with evaluation_weights(trainer.state):
                torch.testing.assert_close(dict(model.state_dict()), dict(average), rtol=0, atol=0)
            torch.testing.assert_close(dict(model.state_dict()), dict(average), rtol=0, atol=0)
            raise RuntimeError("inside")
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
        assert storage == [parameter.data_ptr() for parameter in model.parameters()]
        assert not torch.equal(average["module.1.weight"], before["module.1.weight"])


def test_the_model_of_a_checkpoint_is_the_average(make_trainer, tmp_path):
    with make_trainer(EMA("2ba"), batch_norm=True) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
        torch.testing.assert_close(read_file(tmp_path / "checkpoint", "model.pt"), averaged(trainer), rtol=0, atol=0)
        trained = read_file(tmp_path / "checkpoint", "state.pt")["model"]
        torch.testing.assert_close(trained, dict(trainer.state.unwrapped_model.state_dict()), rtol=0, atol=0)


def test_bfloat16_weights_are_averaged_in_float32():
    average, weights = [torch.zeros(1)], [torch.ones(1, dtype=torch.bfloat16)]
    for _ in range(1000):
        update_average(average, weights, smoothing_of(1000))
    torch.testing.assert_close(average[0], torch.tensor([0.5]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("arguments", "duration", "warns"),
    [
        ({"half_life": "1ba", "start": "5ep"}, "1ep", True),
        ({"half_life": "1ep"}, "16sp", True),  # the average is a copy of the weights at the start
        ({"half_life": "1ep"}, "24sp", False),
        ({"half_life": "4ba"}, "1ba", False),
    ],
)
def test_a_run_without_an_update_warns(make_trainer, tmp_path, caplog, arguments: dict, duration: str, warns: bool):
    with make_trainer(EMA(**arguments), max_duration=duration) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    with make_trainer(EMA(**arguments), max_duration=duration, resume_path=tmp_path / "checkpoint") as resumed:
        resumed.fit(may_be_over=True)
    warnings = [message for message in warnings_of(caplog) if "is longer than the run" not in message]
    assert len(warnings) == 2 * warns
    assert all("ema averages nothing, update_interval=" in message for message in warnings)


@pytest.mark.parametrize(("half_life", "warns"), [("7ba", True), ("6ba", False), ("3ep", True), ("2ep", False)])
def test_a_half_life_longer_than_the_run_warns(make_trainer, caplog, half_life: str, warns: bool):
    with make_trainer(EMA(half_life)) as trainer:  # six batches, two epochs
        trainer.fit()
    text = f"ema.half_life={half_life!r} is longer than the run of '6ba': the average hardly moves away from its start"
    assert warnings_of(caplog) == [text] * warns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"half_life": None}, "half_life=None"),
        ({"smoothing": 0.9}, "smoothing=0.9"),
        ({"half_life": None, "smoothing": 1.0}, "smoothing=1.0"),
        ({"half_life": "10sp"}, "half_life='10sp'"),
        ({"half_life": "0ba"}, "half_life='0ba'"),
        ({"half_life": "10"}, "half_life='10'"),
        ({"update_interval": "1ep"}, "update_interval='1ep'"),
        ({"start": "half"}, "start='half'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        EMA(**arguments)


@pytest.mark.parametrize("stop_at", [2, 4])
@pytest.mark.parametrize("arguments", [{"half_life": "2ba"}, {"half_life": "1ep"}, {"start": "5ba"}])
def test_a_resumed_run_is_bit_identical(check_resume, arguments: dict, stop_at: int):
    check_resume(lambda: [EMA(**arguments)], stop_at, batch_norm=True)
