from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from algorithms import EMA, LAWA, SWA, ScheduleFree
from runner import Callback, evaluation_weights


class History(Callback):
    """Weights after each batch."""

    def __init__(self):
        self.after_batch = []

    def batch_end(self, state, logger):
        self.after_batch.append(copy.deepcopy(dict(state.unwrapped_model.state_dict())))


def averaged(trainer) -> dict[str, torch.Tensor]:
    with evaluation_weights(trainer.state):
        return copy.deepcopy(dict(trainer.state.unwrapped_model.state_dict()))


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"window": 3, "update_interval": "1ba"}, [3, 4, 5]),
        ({"window": 2, "update_interval": "2ba"}, [3, 5]),
        ({"window": 5, "update_interval": "1ep"}, [2, 5]),
        ({"window": 5, "update_interval": "1ba", "start": "0.8dur"}, [4, 5]),
    ],
)
def test_the_latest_weights_are_averaged(make_trainer, arguments: dict[str, Any], taken: list[int]):
    history = History()
    with make_trainer(LAWA(**arguments), callbacks=[history], max_duration="2ep") as trainer:
        trainer.fit()
        own = averaged(trainer)
    for name, value in own.items():
        mean = sum(history.after_batch[index][name] for index in taken) / len(taken)
        torch.testing.assert_close(value, mean)


def test_training_is_the_same_with_and_without(make_trainer):
    with make_trainer(batch_norm=True) as plain, make_trainer(LAWA(2, "1ba"), batch_norm=True) as ours:
        plain.fit()
        ours.fit()
    torch.testing.assert_close(
        dict(ours.state.unwrapped_model.state_dict()), dict(plain.state.unwrapped_model.state_dict()), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"update_interval": 0}, "update_interval=0"),
        ({"start": "soon"}, "start='soon'"),
        ({"bn_batches": 1.5}, "bn_batches=1.5"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LAWA(**arguments)


@pytest.mark.parametrize("other", [EMA, SWA, ScheduleFree])
def test_other_averages_are_refused_beside_it(make_trainer, other: Any):
    with pytest.raises(ValueError, match="cannot be combined"):
        make_trainer(LAWA(), other())


@pytest.mark.parametrize("stop_at", [2, 4])
def test_resume(check_resume, stop_at: int):
    check_resume(lambda: [LAWA(3, "1ba")], stop_at, batch_norm=True)
