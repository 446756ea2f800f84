from __future__ import annotations

from typing import Any

import pytest
import torch
from observers import StopAt, warnings_of
from torch import nn

from runner import Callback, ClassificationModel, LanguageModel, save_checkpoint
from runner.algorithms import GradientClipping, LayerFreezing
from runner.algorithms.layer_freezing import frozen_fraction, layers_of
from runner.callbacks import InMemoryLogger
from runner.data import TensorLoader
from runner.models import GPT

LAYERS = ("module.1", "module.2", "module.3", "module.4")


def build_deep() -> ClassificationModel:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    return ClassificationModel(nn.Sequential(nn.Flatten(), *layers).double(), 3)


class Changes(Callback):
    """Stores the names of the layers that each epoch changed, and the number of gradients in its last batch."""

    def __init__(self):
        self.seen, self.gradients = [], []

    def epoch_start(self, state, logger):
        self.before = {name: tensor.clone() for name, tensor in state.unwrapped_model.state_dict().items()}

    def after_train_batch(self, state, logger):
        self.count = sum(parameter.grad is not None for parameter in state.unwrapped_model.parameters())

    def epoch_end(self, state, logger):
        now = state.unwrapped_model.state_dict()
        self.seen.append(
            [name for name in LAYERS if not torch.equal(now[f"{name}.weight"], self.before[f"{name}.weight"])]
        )
        self.gradients.append(self.count)


def test_the_frozen_fraction_rises_linearly():
    values = [frozen_fraction(elapsed, 0.5, 0.8) for elapsed in (0, 0.5, 0.75, 1)]
    assert values == pytest.approx([0, 0, 0.4, 0.8])
    assert frozen_fraction(1.0, 0.0, 1.0) == 1.0


def test_layers_freeze_from_the_first_to_the_last(make_trainer):
    changes, memory = Changes(), InMemoryLogger()
    with make_trainer(
        LayerFreezing(0.25, 1.0), build=build_deep, callbacks=[changes], loggers=[memory], max_duration="4ep"
    ) as trainer:
        trainer.fit()
        model = trainer.state.unwrapped_model
    # After epochs 1 to 4, fractions of 0, 1/3, 2/3 and 1 of the three layers are frozen.
    assert changes.seen == [list(LAYERS), list(LAYERS), list(LAYERS[1:]), list(LAYERS[2:])]
    assert changes.gradients == [8, 8, 6, 4]
    _, counts = memory.get_timeseries("layer_freezing/layers_frozen")
    _, fractions = memory.get_timeseries("layer_freezing/percentage_frozen")
    assert counts == [0, 1, 2, 3] and fractions == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert all(parameter.requires_grad for parameter in model.parameters())  # unfrozen when the Trainer closes


def test_weight_decay_and_momentum_do_not_change_frozen_layers(make_trainer):
    class Watch(Callback):
        def epoch_start(self, state, logger):
            self.first = state.unwrapped_model.get_parameter("module.1.weight").clone()

    watch = Watch()
    with make_trainer(
        LayerFreezing(0.0, 1.0),
        GradientClipping("norm", 0.1),
        build=build_deep,
        callbacks=[watch],
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5),
        max_duration="3ep",
    ) as trainer:
        trainer.fit()
        assert torch.equal(trainer.state.unwrapped_model.get_parameter("module.1.weight"), watch.first)


def test_layers_are_ordered_from_the_embedding_to_the_head():
    gpt = GPT(vocab_size=11, context=8, d_model=8, n_layers=1, n_heads=2)
    layers = layers_of(gpt)
    assert layers[0] is gpt.token_embedding and layers[-1] is gpt.head


def test_a_tied_embedding_is_not_frozen(make_trainer):
    tokens = torch.randint(11, (24, 9), generator=torch.Generator().manual_seed(0))
    loader = TensorLoader(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), batch_size=8, shuffle=True)
    torch.manual_seed(0)
    model = LanguageModel(GPT(vocab_size=11, context=8, d_model=8, n_layers=1, n_heads=2))
    arguments = {"model": model, "train_dataloader": loader, "eval_dataloader": None, "max_duration": "2ep"}
    with make_trainer(LayerFreezing(0.0, 1.0), **arguments) as trainer:
        trainer.fit()
        learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "module.token_embedding.weight" in learning and "module.position_embedding.weight" not in learning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"freeze_start": 1.0}, "freeze_start=1.0"), ({"freeze_level": 1.1}, "freeze_level=1.1")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LayerFreezing(**arguments)


def test_a_model_of_one_layer_is_refused(make_trainer):
    model = ClassificationModel(nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).double(), 3)
    with make_trainer(LayerFreezing(), model=model) as trainer, pytest.raises(ValueError, match="at least two layers"):
        trainer.fit()


@pytest.mark.parametrize(
    ("arguments", "duration", "warns"),
    [
        ((), "1ep", True),
        ((0.5, 1.0), "2ep", True),
        ((0.0, 1.0), "2ep", False),
        ((0.25, 1.0), "4ep", False),
        ((0.25, 1.0), "7ba", False),  # the third epoch has one batch
        ((0.25, 0.5), "4ep", False),
        ((0.25, 0.4), "4ep", True),  # less than one of three layers before the last epoch ends
        ((0.0, 1.0), "16sp", True),
        ((0.0, 1.0), "24sp", True),  # frozen only when training has ended
        ((0.0, 1.0), "48sp", False),
    ],
)
def test_a_run_that_freezes_nothing_warns(make_trainer, caplog, arguments: tuple, duration: str, warns: bool):
    num_gradients, warnings_at_start = [], []

    class Learning(Callback):
        def fit_start(self, state, logger):
            warnings_at_start.extend(warnings_of(caplog))

        def after_train_batch(self, state, logger):
            num_gradients.append(sum(parameter.grad is not None for parameter in state.unwrapped_model.parameters()))

    with make_trainer(
        LayerFreezing(*arguments), build=build_deep, callbacks=[Learning()], max_duration=duration
    ) as trainer:
        trainer.fit()
    warnings = warnings_of(caplog)
    assert len(warnings) == warns == (min(num_gradients) == len([*build_deep().parameters()]))
    assert warnings_at_start == (warnings if "sp" not in duration else [])
    assert all("layer_freezing freezes nothing" in message and f"{duration!r}" in message for message in warnings)


def test_a_stopped_run_does_not_warn(make_trainer, caplog):
    with make_trainer(LayerFreezing(), build=build_deep, callbacks=[StopAt(2)], max_duration="4ep") as trainer:
        trainer.fit()
    assert warnings_of(caplog) == []


def test_a_run_resumed_with_frozen_layers_does_not_warn(make_trainer, tmp_path, caplog):
    arguments = {"build": build_deep, "max_duration": "48sp"}
    with make_trainer(LayerFreezing(0.0, 1.0), callbacks=[StopAt(4)], **arguments) as first:
        first.fit()
        save_checkpoint(first.state, tmp_path / "checkpoint")
    with make_trainer(LayerFreezing(0.0, 1.0), resume_path=tmp_path / "checkpoint", **arguments) as second:
        second.fit()
    assert warnings_of(caplog) == []


def test_a_resumed_run_is_bit_identical(check_resume):
    check_resume(lambda: [LayerFreezing(0.0, 1.0)], build=build_deep)
