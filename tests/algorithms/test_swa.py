from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from observers import averaged, warnings_of
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, update_bn

from runner import Callback, save_checkpoint
from runner.algorithms import SWA
from runner.algorithms.swa import annealed
from runner.checkpoints.files import read_file
from runner.data import DatasetLoader
from runner.optim.schedulers import linear


class Reference(Callback):
    """Averages the weights after chosen batches with torch."""

    def __init__(self, batches: list[int]):
        self.batches = batches

    def fit_start(self, state, logger):
        self.average = AveragedModel(state.unwrapped_model)

    def batch_end(self, state, logger):
        if state.timestamp.batch in self.batches:
            self.average.update_parameters(state.unwrapped_model)


class Rates(Callback):
    """Stores the learning rate of each batch."""

    def __init__(self):
        self.seen = []

    def after_train_batch(self, state, logger):
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])


def only_weights(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if "running" not in name and "num_batches" not in name}


@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ({"start": "0.5dur", "end": "1dur", "update_interval": "1ba"}, [3, 4, 5, 6]),
        ({"start": "2ba", "end": "5ba", "update_interval": "2ba"}, [2, 4]),
        ({"start": "1ep", "end": "2ep"}, [3, 6]),
        ({"start": "0ba", "end": "0.5dur", "update_interval": "1ba"}, [1, 2, 3]),
    ],
)
def test_parameters_are_averaged_as_torch_does(make_trainer, arguments: dict[str, Any], updates: list[int]):
    reference = Reference(updates)
    with make_trainer(SWA(**arguments), callbacks=[reference], max_duration="2ep") as trainer:
        trainer.fit()
        average = averaged(trainer)
    torch.testing.assert_close(average, dict(reference.average.module.state_dict()))
    assert not torch.equal(average["module.1.weight"], dict(trainer.state.model.state_dict())["module.1.weight"])


@pytest.mark.parametrize("bn_batches", [2, 10])
def test_batch_norm_statistics_equal_those_of_torchs_update_bn(make_trainer, bn_batches: int):
    algorithm = SWA("0ba", "1dur", "1ba", bn_batches=bn_batches)
    with make_trainer(algorithm, batch_norm=True) as trainer:
        trainer.fit()
        average = averaged(trainer)
        trained = copy.deepcopy(trainer.state.unwrapped_model)
        loader = trainer.state.train_dataloader
        loader.seek(0, 0)
        batches = list(loader)[:bn_batches]
    reference = copy.deepcopy(trained)
    reference.load_state_dict(only_weights(average), strict=False)
    update_bn([batch[0] for batch in batches], reference.module)
    torch.testing.assert_close(average, dict(reference.state_dict()))
    assert not torch.equal(average["module.2.running_mean"], trained.state_dict()["module.2.running_mean"])


def test_without_bn_batches_the_statistics_of_training_are_kept(make_trainer):
    with make_trainer(SWA("0ba", "1dur", "1ba", bn_batches=0), batch_norm=True) as trainer:
        trainer.fit()
        average, trained = averaged(trainer), dict(trainer.state.unwrapped_model.state_dict())
    assert torch.equal(average["module.2.running_mean"], trained["module.2.running_mean"])


def test_statistics_are_estimated_once_and_without_changing_random_draws(make_trainer):
    with make_trainer(SWA("0ba", "1dur", "1ba", bn_batches=2), batch_norm=True) as trainer:
        trainer.fit()
        passes: list[int] = []
        trainer.state.unwrapped_model.register_forward_hook(lambda *_: passes.append(1))
        trainer.state.algorithms[0]._changed()
        torch.manual_seed(3)
        before = torch.get_rng_state()
        first, second = averaged(trainer), averaged(trainer)
    assert len(passes) == 2
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_estimating_statistics_within_an_epoch_does_not_change_training(make_trainer):
    images, targets = torch.randn(24, 2, 4, 4, dtype=torch.float64), torch.arange(24) % 3

    def trained(*algorithms: Any):
        data = torch.utils.data.TensorDataset(images, targets)
        loader = DatasetLoader(data, batch_size=8, shuffle=True)
        arguments = {"train_dataloader": loader, "batch_norm": True, "eval_interval": "1ba"}
        with make_trainer(*algorithms, **arguments) as trainer:
            trainer.fit()
        return dict(trainer.state.unwrapped_model.state_dict()), trainer.state.eval_metric_values["eval"]["loss"]

    (expected, plain_loss), (weights, loss) = trained(), trained(SWA("0ba", "1dur", "1ba"))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert float(loss) != float(plain_loss)


def test_evaluations_and_checkpoints_see_the_average(make_trainer, tmp_path):
    with make_trainer(SWA("0ba", "1dur", "1ba"), batch_norm=True) as trainer:
        trainer.fit()
        values, average = trainer.eval(), averaged(trainer)
        trained = copy.deepcopy(dict(trainer.state.unwrapped_model.state_dict()))
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
        torch.testing.assert_close(dict(trainer.state.unwrapped_model.state_dict()), trained, rtol=0, atol=0)
        torch.testing.assert_close(read_file(tmp_path / "checkpoint", "model.pt"), average, rtol=0, atol=0)
    with make_trainer(batch_norm=True) as untrained:
        untrained.state.unwrapped_model.load_state_dict(average)
        torch.testing.assert_close(untrained.eval(), values)


@pytest.mark.parametrize("schedulers", [None, linear()])
def test_the_rate_is_annealed_to_swa_lr(make_trainer, schedulers: Any):
    rates = Rates()
    algorithm = SWA("2ba", "1dur", "1ba", swa_lr=0.5, anneal_steps=3)
    with make_trainer(algorithm, callbacks=[rates], schedulers=schedulers) as trainer:
        trainer.fit()
    scheduled = [0.1 * (1 - n / 6 if schedulers else 1) for n in range(6)]
    parts = (1 / 3, 2 / 3, 1, 1)
    expected = [(1 - part) * rate + part * 0.5 for rate, part in zip(scheduled[2:], parts, strict=True)]
    assert rates.seen == pytest.approx([*scheduled[:2], *expected])
    assert [annealed(0.1, 0.5, x) for x in (0, 0.5, 1, 2)] == pytest.approx([0.1, 0.3, 0.5, 0.5])


def test_runs_that_swa_cannot_average_are_refused(make_trainer):
    with (
        make_trainer(SWA("0.7dur", "0.97dur", "1ep"), max_duration="2ep") as trainer,
        pytest.raises(ValueError, match="no update falls between start='0.7dur' and end='0.97dur'"),
    ):
        trainer.fit()
    with pytest.raises(ValueError, match=r"swa_lr=0.1: torch's own schedulers"):
        make_trainer(SWA(swa_lr=0.1), schedulers=lambda optimizer: StepLR(optimizer, 1))
    batches = iter([(torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.arange(8) % 3)] * 6)
    algorithm = SWA("0ba", "1dur", "1ba")
    with (
        make_trainer(algorithm, batch_norm=True, train_dataloader=batches) as trainer,
        pytest.raises(ValueError, match="bn_batches=10: .*set bn_batches=0"),
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("start", "end", "interval"),
    [("0ba", "0.5dur", "1ep"), ("4ba", "5ba", "3ba"), ("0.31dur", "0.39dur", "0.1dur"), ("4ba", "1dur", "1ba")],
)
def test_times_without_an_update_are_refused(make_trainer, start: str, end: str, interval: str):
    message = f"^update_interval='{interval}': no update falls between start='{start}' and end='{end}' of "
    with (
        make_trainer(SWA(start, end, interval), max_duration="1ep") as trainer,
        pytest.raises(ValueError, match=message),
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("start", "end", "duration"), [("5ep", "6ep", "1ep"), ("0.7dur", "0.97dur", "24sp"), ("4ba", "8ba", "5ba")]
)
def test_a_run_that_ends_before_the_first_update_warns(make_trainer, caplog, start: str, end: str, duration: str):
    with make_trainer(SWA(start, end), max_duration=duration) as trainer:
        trainer.fit()
    assert warnings_of(caplog) == [
        f"swa averages nothing, update_interval='1ep': no update falls between start={start!r} and end={end!r} of "
        f"max_duration={duration!r}; update earlier or more often"
    ]


@pytest.mark.parametrize(("start", "end"), [("2ep", "4ep"), ("0.5dur", "1dur")])
def test_a_part_of_a_run_may_have_no_update(make_trainer, start: str, end: str):
    with make_trainer(SWA(start, end, "2ep")) as trainer:
        trainer.fit(duration="1ep")
        assert trainer.state.algorithms[0].state_dict()["count"] == 0
        trainer.fit(duration="1ep")
        assert trainer.state.algorithms[0].state_dict()["count"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "half"}, "start='half'"),
        ({"start": "0.9dur", "end": "0.5dur"}, "end='0.5dur': must not be before start='0.9dur'"),
        ({"update_interval": 0}, "update_interval=0"),
        ({"swa_lr": -1.0}, "swa_lr=-1.0"),
        ({"anneal_steps": -1}, "anneal_steps=-1"),
        ({"bn_batches": -1}, "bn_batches=-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SWA(**arguments)


@pytest.mark.parametrize("stop_at", [2, 4])
@pytest.mark.parametrize("swa_lr", [None, 0.05])
def test_a_resumed_run_is_bit_identical(check_resume, swa_lr: float | None, stop_at: int):
    arguments = {"start": "2ba", "end": "6ba", "update_interval": "1ba", "swa_lr": swa_lr, "anneal_steps": 3}
    check_resume(lambda: [SWA(**arguments)], stop_at, batch_norm=True)
