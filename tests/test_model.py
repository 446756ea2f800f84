from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric

from runner.model import ClassificationModel, LanguageModel, Model


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


Pair = namedtuple("Pair", "inputs targets")


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        (torch.zeros(4, 2), torch.zeros(3)),
        [torch.zeros(4)],
        Pair(torch.zeros(4, 2), torch.zeros(4)),
        {"inputs": torch.zeros(4, 2), "targets": torch.zeros(3)},
        OrderedDict(scale=torch.tensor(2.0), inputs=torch.zeros(4)),
        UserDict(inputs=torch.zeros(4)),
        (["a", "b"], {"nested": [(), {}, torch.zeros(4, 1)]}, torch.zeros(9)),
    ],
    ids=str,
)
def test_samples_are_counted_along_the_first_dimension_of_the_first_tensor(batch):
    assert Regression().num_samples(batch) == 4


@pytest.mark.parametrize(("batch", "name"), [("text", "str"), (7, "int"), ([], "list"), ({"a": None}, "dict")])
def test_a_batch_without_tensors_is_an_error_that_says_what_to_override(batch, name):
    with pytest.raises(TypeError, match=rf"batch of type {name}: .*override Model.num_samples"):
        Regression().num_samples(batch)


def test_classification_takes_class_numbers_and_probabilities():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(6, 5, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    module = nn.Linear(5, 3)
    model = ClassificationModel(module, num_classes=3)
    outputs = model((inputs, labels))
    torch.testing.assert_close(outputs, module(inputs))
    by_hand = -outputs.log_softmax(1)[torch.arange(6), labels].mean()
    torch.testing.assert_close(model.loss(outputs, (inputs, labels)), by_hand)
    torch.testing.assert_close(model.loss(outputs, (inputs, F.one_hot(labels).float())), by_hand)


def test_classification_with_another_loss():
    model = ClassificationModel(nn.Linear(5, 3), 3, loss_fn=nn.MultiMarginLoss())
    outputs, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(model.loss(outputs, (None, labels)), F.multi_margin_loss(outputs, labels))


@pytest.mark.parametrize("soft", [False, True])
def test_classification_accuracy_is_plain_top_1_over_uneven_classes_and_batches(soft):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 4, generator=generator)
    labels = torch.randint(4, (50,), generator=generator).clamp(max=2)  # the classes are not equally frequent
    model = ClassificationModel(nn.Identity(), 4)
    (name, metric), *others = model.metrics(train=False).items()
    assert (name, others) == ("MulticlassAccuracy", [])
    for part in (slice(0, 1), slice(1, 40), slice(40, 50)):
        targets = 0.4 * F.one_hot(labels[part], 4) + 0.15 if soft else labels[part]
        model.update_metric((None, targets), outputs[part], metric)
    assert metric.compute().item() == pytest.approx((outputs.argmax(1) == labels).double().mean().item())


def test_classification_accuracy_is_of_the_targets_that_validate_gives():
    class Shifted(ClassificationModel):
        def validate(self, batch):
            return self(batch), (batch[1] + 1) % 3

    model = Shifted(nn.Identity(), 3)
    batch = torch.eye(3), torch.tensor([2, 0, 0])
    metric = model.metrics(train=False)["MulticlassAccuracy"]
    model.update_metric(batch, model.eval_forward(batch), metric)
    assert metric.compute().item() == pytest.approx(2 / 3)  # of its own targets, the model gets none right


def test_every_call_gives_new_metrics():
    model = ClassificationModel(nn.Identity(), 4)
    assert model.metrics(True)["MulticlassAccuracy"] is not model.metrics(False)["MulticlassAccuracy"]


def test_a_classifier_of_one_class_is_refused():
    with pytest.raises(ValueError, match="num_classes=1: "):
        ClassificationModel(nn.Identity(), 1)


class Bigram(nn.Module):
    def __init__(self, vocab_size=6):
        super().__init__()
        self.logits = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        return self.logits(tokens)


def token_batch():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(6, (2, 3, 4), generator=generator)
    targets[0, :3] = -100
    targets[2, 1] = -100
    return inputs, targets


def test_language_model_loss_is_torchs_mean_over_the_valid_targets():
    model, batch = LanguageModel(Bigram()), token_batch()
    outputs = model(batch)
    assert outputs.shape == (3, 4, 6)
    torch.testing.assert_close(
        model.loss(outputs, batch), F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), ignore_index=-100)
    )
    weight = model.loss_weight(batch)
    assert (weight.shape, weight.dtype, weight.item()) == ((), torch.int64, 8)
    assert (model.num_samples(batch), model.num_tokens(batch)) == (3, 12)


def test_weighed_microbatches_give_the_gradient_of_the_whole_batch_even_when_one_has_no_valid_target():
    bigram, batch = Bigram(), token_batch()
    model = LanguageModel(bigram)
    batch[1][1] = -100
    model.loss(model(batch), batch).backward()
    whole = bigram.logits.weight.grad
    assert whole is not None
    model.zero_grad(set_to_none=True)
    for row in range(3):
        part = batch[0][row : row + 1], batch[1][row : row + 1]
        (model.loss(model(part), part) * model.loss_weight(part) / model.loss_weight(batch)).backward()
    torch.testing.assert_close(bigram.logits.weight.grad, whole)
    assert whole.isfinite().all()
    assert whole.any()


def test_language_model_metric_is_the_loss_in_bits():
    model, batch = LanguageModel(Bigram(), metric_name="BitsPerByte"), token_batch()
    assert model.metrics(train=True) == {}
    metrics = model.metrics(train=False)
    assert list(metrics) == ["BitsPerByte"]
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, metrics["BitsPerByte"])
    bits = model.loss(outputs, batch) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(metrics["BitsPerByte"].compute(), bits)
    assert list(LanguageModel(Bigram()).metrics(train=False)) == ["BitsPerToken"]


def test_language_model_operations_are_those_of_its_module():
    class Counting(Bigram):
        def flops_per_token(self, context):
            return 10.0 * context

    assert LanguageModel(Bigram()).flops_per_batch(token_batch()) is None
    assert LanguageModel(Counting()).flops_per_batch(token_batch()) == 12 * 40.0
