"""The defaults of `Model`, what subclasses must define, and its modes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric

from runner.models.model import Model, in_eval_mode


class Regression(Model):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, batch):
        return self.linear(batch[0])

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[1])


class RecordUpdates(Metric):
    """Records the arguments of each update."""

    def __init__(self):
        super().__init__()
        self.updates = []

    def update(self, outputs, targets):
        self.updates.append((outputs, targets))

    def compute(self):
        return len(self.updates)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=generator), torch.randn(5, 1, generator=generator)


def test_the_defaults_of_a_model(batch):
    model = Regression()
    assert model.training_step is None
    assert model.metrics(train=True) == model.metrics(train=False) == {}
    assert (model.num_samples(batch), model.num_tokens(batch), model.loss_weight(batch)) == (5, 0, 5)
    assert model.flops_per_batch(batch) is None
    torch.testing.assert_close(model.eval_forward(batch), model.linear(batch[0]))
    outputs = torch.zeros(5, 1)
    assert model.eval_forward(batch, outputs) is outputs
    metric = RecordUpdates()
    model.update_metric(batch, outputs, metric)
    assert metric.updates[0][0] is outputs
    assert metric.updates[0][1] is batch[1]


def test_batches_that_are_mappings_need_their_own_update_metric(batch):
    message = r"Regression: a batch that is a mapping has no batch\[1\]; override update_metric"
    with pytest.raises(TypeError, match=message):
        Regression().update_metric({"inputs": batch[0], "targets": batch[1]}, torch.zeros(5, 1), RecordUpdates())


def test_a_model_without_forward_or_loss_cannot_be_made():
    class NoForward(Model):
        def loss(self, outputs, batch):
            return outputs

    class NoLoss(Model):
        def forward(self, batch):
            return batch

    with pytest.raises(TypeError, match="NoForward has no forward: define forward"):
        NoForward()
    with pytest.raises(TypeError, match=r"NoLoss has no loss: define loss\(self, outputs, batch\), or training_step"):
        NoLoss()


def test_a_model_with_a_training_step_needs_no_loss():
    class Adversarial(Model):
        def forward(self, batch):
            return batch

        def training_step(self, state):
            return state

    model = Adversarial()
    assert model.training_step is not None and model.training_step("state") == "state"
    with pytest.raises(TypeError, match="Adversarial has no loss"):
        model.loss(1, 1)


def test_validate_replaces_the_outputs_and_targets_of_an_evaluation(batch):
    class WithValidate(Regression):
        def validate(self, batch):
            return self.forward(batch), batch[1] + 100

    model, metric = WithValidate(), RecordUpdates()
    outputs = model.eval_forward(batch)
    torch.testing.assert_close(outputs, model.linear(batch[0]))
    model.update_metric(batch, outputs, metric)
    torch.testing.assert_close(metric.updates[0][1], batch[1] + 100)

    train_batch = (batch[0], batch[1] - 7)  # a later training batch has its own targets
    model.update_metric(train_batch, model(train_batch), metric)
    assert metric.updates[1][1] is train_batch[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("overrides_train", [False, True])
def test_in_eval_mode_changes_all_modules_and_restores_their_modes(overrides_train: bool):
    """A ScriptModule keeps its mode in C++; frozen layers override `train` in the class or on the instance."""

    class Frozen(nn.Dropout):
        def train(self, mode=True):
            modes.append(mode)
            return super().train(False)

    modes: list[bool] = []
    network = nn.Sequential(nn.Dropout(), torch.jit.script(nn.Sequential(nn.Dropout())), nn.Linear(2, 2))
    network[2].eval()
    if overrides_train:
        network.extend([Frozen().eval(), nn.Dropout()])
        vars(network[4])["train"] = lambda mode: modes.append(mode)
    before = [module.training for module in network.modules()]
    modes.clear()
    ones = torch.ones(8, 2)
    with in_eval_mode(network):
        assert not any(module.training for module in [network, *network[:4].children()])
        assert torch.equal(network[1](ones), ones)
    assert [module.training for module in network.modules()] == before and modes == [False] * 2 * overrides_train
    assert not torch.equal(network[1](ones), ones)
