from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from runner import Callback, ClassificationModel, LanguageModel
from runner.algorithms import LabelSmoothing
from runner.algorithms.label_smoothing import smooth_labels
from runner.data import TensorLoader
from runner.models import GPT

GENERATOR = torch.Generator().manual_seed(1)
LOGITS = torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
IMAGE_LOGITS = torch.randn(3, 4, 5, 2, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("logits", [LOGITS, IMAGE_LOGITS], ids=["NC", "NCHW"])
@pytest.mark.parametrize("ignored", [0, 2])
def test_index_targets_give_the_loss_of_torch(logits: torch.Tensor, smoothing: float, ignored: int):
    targets = torch.randint(4, logits.shape[:1] + logits.shape[2:], generator=GENERATOR)
    targets.view(-1)[:ignored] = -100
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(F.cross_entropy(logits, smooth_labels(targets, logits, smoothing)), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_one_hot_and_probabilities_give_the_loss_of_torch(dtype: torch.dtype):
    one_hot = F.one_hot(torch.randint(4, (6,), generator=GENERATOR), 4).to(dtype)
    expected = F.cross_entropy(LOGITS, one_hot.double(), label_smoothing=0.2)
    torch.testing.assert_close(F.cross_entropy(LOGITS, smooth_labels(one_hot, LOGITS, 0.2)), expected)


def test_bfloat16_logits_get_targets_in_float32():
    smoothed = smooth_labels(torch.tensor([1]), torch.zeros(1, 3, dtype=torch.bfloat16), 0.3)
    torch.testing.assert_close(smoothed, torch.tensor([[0.1, 0.8, 0.1]]))


def test_targets_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"targets of shape \(6, 4\)"):
        smooth_labels(torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 4, 9))


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_wrong_arguments_are_refused(smoothing: float):
    with pytest.raises(ValueError, match=f"smoothing={smoothing}"):
        LabelSmoothing(smoothing)


@pytest.mark.parametrize("grad_accum", [1, 4])
def test_gradients_are_those_of_the_smoothed_loss(train, make_trainer, grad_accum: int):
    record = train(LabelSmoothing(0.2), max_duration="1ba", grad_accum=grad_accum)
    model = make_trainer().state.unwrapped_model
    images, targets = record.batches[0]
    F.cross_entropy(model.module(images), targets, label_smoothing=0.2).backward()
    torch.testing.assert_close(record.gradients[0], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("length", [4, 5])  # 4 classes: the shapes do not tell which dimension holds them
def test_a_language_model_is_smoothed_over_its_vocabulary(make_trainer, length: int):
    class SmoothedByTorch(LanguageModel):
        def loss(self, outputs, batch):
            return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), label_smoothing=0.3)

    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(4, (2, 6, length), generator=generator)
    targets[0, 1] = targets[4, 0] = -100

    def trained(algorithms: list, kind: type[LanguageModel], grad_accum: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = kind(GPT(vocab_size=4, context=length, d_model=8, n_layers=1, n_heads=2, dropout=0.0).double())
        data = TensorLoader(tokens, targets, batch_size=6, shuffle=False)
        arguments = {"model": model, "train_dataloader": data, "eval_dataloader": None, "max_duration": "2ba"}
        with make_trainer(*algorithms, grad_accum=grad_accum, **arguments) as trainer:
            trainer.fit()
        return list(model.parameters())

    expected = trained([], SmoothedByTorch, 1)
    torch.testing.assert_close(trained([LabelSmoothing(0.3)], LanguageModel, 1), expected)
    torch.testing.assert_close(trained([LabelSmoothing(0.3)], LanguageModel, 3), expected)


def test_class_dim_is_the_dimension_of_the_classes(train, make_trainer):
    class Rows(ClassificationModel):
        def forward(self, batch):
            return super().forward(batch).unsqueeze(1)

        def loss(self, outputs, batch):
            return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(0, 1))

        def metrics(self, train):
            return {}

    def make_rows() -> Rows:
        return Rows(make_trainer().state.unwrapped_model.module, 3)

    loader = make_trainer().state.train_dataloader
    images, targets = next(iter(loader))
    data = TensorLoader(images, targets.unsqueeze(1), batch_size=len(images), shuffle=False)
    smoothing = LabelSmoothing(0.2, class_dim=2)
    arguments = {"model": make_rows(), "train_dataloader": data, "eval_dataloader": None, "max_duration": "1ba"}
    record = train(smoothing, **arguments)
    model = make_rows()
    F.cross_entropy(model.module(images), targets, label_smoothing=0.2).backward()
    torch.testing.assert_close(record.gradients[0], [p.grad for p in model.parameters()])


class BatchesAfterLoss(Callback):
    """Stores the microbatch and the batch after each loss."""

    def __init__(self):
        self.seen = []

    def after_loss(self, state, logger):
        self.seen.append((state.microbatch, state.batch))


def test_the_original_targets_are_restored_after_the_loss(make_trainer):
    after = BatchesAfterLoss()
    with make_trainer(LabelSmoothing(0.5), callbacks=[after]) as trainer:
        trainer.fit()
    assert len(after.seen) == 6
    assert all(microbatch is batch and batch[1].dtype is torch.int64 for microbatch, batch in after.seen)


def test_evaluations_are_not_smoothed(make_trainer):
    def losses(*smoothing: LabelSmoothing) -> tuple[float, float]:
        with make_trainer(
            *smoothing, max_duration="1ba", optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.0)
        ) as trainer:
            trainer.fit()
            return float(trainer.state.total_loss), float(trainer.state.eval_metric_values["eval"]["loss"])

    plain, smoothed = losses(), losses(LabelSmoothing(0.9))
    assert smoothed[1] == plain[1] and smoothed[0] != plain[0]


def test_a_custom_loss_gets_probabilities(train, make_trainer):
    class OwnLoss(ClassificationModel):
        def loss(self, outputs, batch):
            assert batch[1].is_floating_point() or not self.training
            return F.cross_entropy(outputs, batch[1])

    expected = train(LabelSmoothing(0.2), max_duration="2ba").gradients
    model = OwnLoss(make_trainer().state.unwrapped_model.module, 3)
    torch.testing.assert_close(train(LabelSmoothing(0.2), max_duration="2ba", model=model).gradients, expected)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["+model.label_smoothing=0.1"],
            "the model's loss smooths labels too (label_smoothing); leave one of the two out",
        ),
        (
            [
                "model=supervised",
                "model.loss_fn._target_=torch.nn.CrossEntropyLoss",
                "+model.loss_fn.label_smoothing=0.1",
            ],
            "the model's loss smooths labels too",
        ),
    ],
)
def test_labels_are_not_smoothed_twice(run_here, words: list[str], reason: str):
    error = run_here("check", "algorithms=label_smoothing", *words, code=2).err
    assert "smoothing=0.1: " in error and reason in error


def test_samples_of_several_classes_are_refused(train):
    model = ClassificationModel(torch.nn.Linear(4, 3), 3, multi_label=True)
    loader = TensorLoader(torch.zeros(4, 4), torch.ones(4, 3), batch_size=4, shuffle=False)
    with pytest.raises(ValueError, match=r"give model\.label_smoothing instead of the algorithm"):
        train(LabelSmoothing(), model=model, train_dataloader=loader, max_duration="1ba")
