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


class Updates(Metric):
    """Keeps what it is updated with."""

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
    metric = Updates()
    model.update_metric(batch, outputs, metric)
    assert metric.updates[0][0] is outputs
    assert metric.updates[0][1] is batch[1]
    with pytest.raises(
        TypeError, match=r"Regression: a batch that is a mapping has no batch\[1\]; override update_metric"
    ):
        model.update_metric({"inputs": batch[0], "targets": batch[1]}, outputs, metric)


def test_a_model_without_forward_or_loss_is_refused_when_it_is_made():
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


def test_a_training_step_stands_in_for_the_loss():
    class Adversarial(Model):
        def forward(self, batch):
            return batch

        def training_step(self, state):
            return state

    model = Adversarial()
    assert model.training_step is not None
    assert model.training_step("state") == "state"
    with pytest.raises(TypeError, match="Adversarial has no loss"):
        model.loss(1, 1)


def test_validate_the_earlier_name_gives_outputs_and_targets(batch):
    class Earlier(Regression):
        def validate(self, batch):
            return self.forward(batch), batch[1] + 100

    model, metric = Earlier(), Updates()
    outputs = model.eval_forward(batch)
    torch.testing.assert_close(outputs, model.linear(batch[0]))
    model.update_metric(batch, outputs, metric)
    torch.testing.assert_close(metric.updates[0][1], batch[1] + 100)

    train_batch = (batch[0], batch[1] - 7)  # a training batch after it has nothing to do with those targets
    model.update_metric(train_batch, model(train_batch), metric)
    assert metric.updates[1][1] is train_batch[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("has_own", [False, True])
def test_evaluation_mode_and_back(has_own: bool):
    """Frozen layers have a `train` of their own, in their class or put onto the object; a ScriptModule is in C++."""

    class Frozen(nn.Dropout):
        def train(self, mode=True):
            called.append(mode)
            return super().train(False)

    called: list[bool] = []
    network = nn.Sequential(nn.Dropout(), torch.jit.script(nn.Sequential(nn.Dropout())), nn.Linear(2, 2))
    network[2].eval()
    if has_own:
        network.extend([Frozen().eval(), nn.Dropout()])
        vars(network[4])["train"] = lambda mode: called.append(mode)
    before = [module.training for module in network.modules()]
    called.clear()
    ones = torch.ones(8, 2)
    with in_eval_mode(network):
        assert not any(module.training for module in [network, *network[:4].children()])
        assert torch.equal(network[1](ones), ones)
    assert [module.training for module in network.modules()] == before and called == [False] * 2 * has_own
    assert not torch.equal(network[1](ones), ones)
