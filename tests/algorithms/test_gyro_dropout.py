from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import ClassificationModel
from runner.algorithms import GyroDropout
from runner.algorithms.gyro_dropout import assign, draw_masks


class Spy(nn.Module):
    """Stores its inputs."""

    def __init__(self):
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.detach().clone())
        return inputs


class Ones(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 0 + 1


def build() -> ClassificationModel:
    """Return a model in which `Spy` stores the outputs of dropout for inputs of ones."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(32, 20), Ones(), nn.Dropout(0.1), Spy(), nn.Linear(20, 3)]
    return ClassificationModel(nn.Sequential(*layers).double(), 3)


def masks_of(make_trainer, *algorithms: Any, **arguments: Any) -> list[Tensor]:
    """Return the factors (8, 20) that dropout applied to each batch of eight samples."""
    with make_trainer(*algorithms, build=build, eval_dataloader=None, **arguments) as trainer:
        trainer.fit()
        seen = torch.cat(trainer.state.unwrapped_model.module[4].seen)
    return list(seen.split(8))


def test_masks_keep_the_mean():
    masks = draw_masks(400, 50, 0.25, seed=0)
    assert sorted(masks.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert float(masks.mean()) == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(draw_masks(3, 4, 0.0, seed=0), torch.ones(3, 4))


def test_samples_are_assigned_evenly_to_subnetworks():
    chosen = torch.tensor([7, 3, 5])
    assert assign(6, 0, 6, chosen).tolist() == [7, 7, 3, 3, 5, 5]
    assert assign(2, 3, 6, chosen).tolist() == [3, 5]
    assert assign(2, 0, 2, chosen).tolist() == [7, 3]


def test_each_group_of_tau_masks_is_used_for_its_share_of_training(make_trainer):
    batches = masks_of(make_trainer, GyroDropout(0.5, sigma=4, tau=2), max_duration="8ba")
    masks = [{tuple(row) for row in batch.tolist()} for batch in batches]
    assert all(len(pair) == 2 for pair in masks)  # one for each half of a batch
    assert all(len({tuple(row) for row in half.tolist()}) == 1 for batch in batches for half in batch.split(4))
    assert masks[0] == masks[1] == masks[2] == masks[3] and masks[4] == masks[7]  # 8 batches x 2 / 4
    assert len(set.union(*masks)) <= 4
    assert {value for row in set.union(*masks) for value in row} == {0.0, 2.0}


def test_microbatches_get_the_masks_of_the_batch(make_trainer):
    whole = masks_of(make_trainer, GyroDropout(sigma=6, tau=3))
    split = masks_of(make_trainer, GyroDropout(sigma=6, tau=3), grad_accum=3)
    torch.testing.assert_close(split, whole, rtol=0, atol=0)


def test_a_probability_of_zero_changes_nothing(make_trainer):
    for mask in masks_of(make_trainer, GyroDropout(p=0.0)):
        assert torch.equal(mask, torch.ones(8, 20, dtype=torch.float64))


def test_evaluation_drops_nothing(make_trainer):
    with make_trainer(GyroDropout(), build=build) as trainer:
        trainer.fit(duration="1ba")
        spy = trainer.state.unwrapped_model.module[4]
        spy.seen.clear()
        trainer.eval()
        assert torch.equal(torch.cat(spy.seen), torch.ones(24, 20, dtype=torch.float64))


@pytest.mark.parametrize(("shape", "dim"), [((5, 7), 1), ((5, 3, 7), 2), ((5, 7, 2, 3), 1)])
def test_a_unit_is_dropped_at_all_positions_of_a_sample(make_trainer, shape: tuple[int, ...], dim: int):
    with make_trainer(GyroDropout(sigma=8, tau=4), build=build) as trainer:
        layer = trainer.state.unwrapped_model.module[3]
    layer.assignment.rows = torch.tensor([0, 0, 1, 2, 3])
    outputs = layer(torch.ones(shape))
    expected = draw_masks(8, 7, 0.5, layer.seed)[layer.assignment.rows]
    for unit in range(7):
        values = outputs.select(dim, unit).reshape(5, -1)
        torch.testing.assert_close(values, expected[:, unit : unit + 1].expand_as(values))
    with pytest.raises(ValueError, match=r"inputs of shape \(15, .*the 5 samples of the microbatch in dimension 0"):
        layer(torch.ones(15, 7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"p": 1.0}, "p=1.0"), ({"sigma": 0}, "sigma=0"), ({"tau": 0}, "tau=0"), ({"tau": 300}, "tau=300")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        GyroDropout(**arguments)


def test_unsuitable_models_and_durations_are_refused(make_trainer):
    with pytest.raises(ValueError, match="allow_no_match=False: GyroDropout found no dropout"):
        make_trainer(GyroDropout())
    make_trainer(GyroDropout(allow_no_match=True)).close()
    with (
        make_trainer(GyroDropout(), build=build, max_duration="100sp") as trainer,
        pytest.raises(ValueError, match="max_duration='100sp': GyroDropout needs to know the number of batches"),
    ):
        trainer.fit()


def test_a_resumed_run_is_bit_identical(check_resume):
    check_resume(lambda: [GyroDropout(sigma=6, tau=2)], build=build)
