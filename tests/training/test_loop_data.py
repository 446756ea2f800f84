"""Loaders and batches that cannot be used are an error; a loss of NaN is not; samples in lists are counted."""

from __future__ import annotations

import pytest
import torch
from loop_runs import make_data, make_trainer

from runner import Model
from runner.callbacks import InMemoryLogger
from runner.data import TensorLoader


def test_an_exhausted_generator_is_an_error_in_the_next_epoch():
    generator = (batch for batch in make_data(2))
    with pytest.raises(ValueError, match="train_dataloader yielded no batch in this epoch") as caught:
        make_trainer(train_dataloader=generator, max_duration="5ba").fit()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("make", [lambda: (batch for batch in make_data(2)), lambda: iter([*make_data(2)])])
def test_a_generator_that_training_needs_twice_is_refused_before_training(make):
    trainer = make_trainer(train_dataloader=make(), max_duration="2ep")
    with pytest.raises(ValueError, match=r"train_dataloader: this \w+ can be read only once, but is needed.*'2ep'"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0
    with pytest.raises(ValueError, match="evaluator 'eval': this .* after '1ep' of '3ep'; give an object"):
        make_trainer(eval_dataloader=make(), eval_interval="1ep", max_duration="3ep").fit()
    with pytest.raises(ValueError, match="after '0.5dur' of '1ep'"):
        make_trainer(eval_dataloader=make(), eval_interval="0.5dur").fit()


def test_a_generator_can_be_trained_and_evaluated_on_once():
    def make():
        return (batch for batch in make_data(2))

    with make_trainer(train_dataloader=make(), eval_dataloader=make()) as trainer:
        trainer.fit()
        assert (trainer.state.timestamp.batch, trainer.state.eval_timestamp.batch) == (2, 2)
        with pytest.raises(ValueError, match="this generator can be read only once"):
            trainer.fit("1ep")
    endless = (batch for _ in iter(int, 1) for batch in make_data(2))
    with make_trainer(train_dataloader=endless, train_subset_num_batches=3, max_duration="2ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 6


def test_a_loader_without_batches_is_an_error_when_the_trainer_is_made():
    dataset = torch.utils.data.TensorDataset(torch.ones(3, 3), torch.zeros(3, dtype=torch.long))
    for loader in ([], torch.utils.data.DataLoader(dataset, batch_size=4, drop_last=True)):
        with pytest.raises(ValueError, match="train_dataloader has no batches.*drop_last"):
            make_trainer(train_dataloader=loader)


@pytest.mark.parametrize(
    ("batch", "name"),
    [(object(), "object"), ((torch.ones(2, 3), {1, 2}), "set"), ({"x": torch.ones(2).numpy()}, "ndarray")],
)
def test_an_object_of_unknown_type_in_a_batch_is_a_single_error(batch, name: str):
    with pytest.raises(TypeError, match=f"a batch holds a {name}; it must be a tensor") as caught:
        make_trainer(train_dataloader=[batch]).fit()
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_a_batch_without_tensors_is_an_error():
    with pytest.raises(TypeError, match="cannot count the samples of a batch of type list"):
        make_trainer(train_dataloader=[["text", 1]]).fit()


def test_a_loss_of_nan_is_logged_and_does_not_end_training():
    inputs = torch.ones(8, 3)
    inputs[2:] = float("nan")
    data = TensorLoader(inputs, torch.zeros(8, dtype=torch.long), batch_size=2, shuffle=False)
    memory = InMemoryLogger()
    arguments = {"train_dataloader": data, "eval_dataloader": data, "loggers": memory, "max_duration": "2ep"}
    with make_trainer(**arguments) as trainer:
        trainer.fit()
    losses = [value for _, value in memory.data["loss/train/total"]]
    assert losses[0] == losses[0] and all(value != value for value in losses[1:]) and len(losses) == 8
    assert memory.data["loss/eval/total"][-1][1] != memory.data["loss/eval/total"][-1][1]
    assert trainer.state.timestamp.epoch == 2


class Detector(Model):
    """Takes a list of images of different sizes and a list of dicts, each with the boxes of an image."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, batch):
        return [self.linear(image.mean((1, 2))) for image in batch[0]]

    def loss(self, outputs, batch):
        errors = [(out - target["boxes"]).square().mean() for out, target in zip(outputs, batch[1], strict=True)]
        return torch.stack(errors).mean()


class Scenes(torch.utils.data.Dataset):
    """Images of different sizes with different numbers of boxes."""

    def __len__(self):
        return 42

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 4 + index % 3, 5, generator=generator)
        boxes = 1 + index % 4
        return image, {"boxes": torch.rand(boxes, 4, generator=generator), "labels": torch.arange(boxes)}


def unzip(samples):
    return tuple(zip(*samples, strict=True))


def scenes():
    return torch.utils.data.DataLoader(Scenes(), batch_size=8, collate_fn=unzip)


def test_samples_in_lists_are_counted_by_timestamps_and_evaluations():
    torch.manual_seed(0)
    model = Detector()
    samples = [unzip([Scenes()[index]]) for index in range(42)]
    losses = torch.stack([model.loss(model(sample), sample) for sample in samples])
    arguments = {"optimizers": lambda params: torch.optim.SGD(params, lr=0.0), "max_duration": "42sp"}
    with make_trainer(model=model, train_dataloader=scenes(), eval_dataloader=scenes(), **arguments) as trainer:
        trainer.fit()
        assert (trainer.state.timestamp.sample, trainer.state.timestamp.epoch) == (42, 1)
        torch.testing.assert_close(trainer.state.eval_metric_values["eval"]["loss"].float(), losses.mean())
        assert trainer.state.eval_timestamp.sample == 42


class CountingDetector(Detector):
    """Takes a dict with images, whose number it returns from `num_samples`."""

    def num_samples(self, batch):
        return len(batch["images"])

    def forward(self, batch):
        return [self.linear(image.mean((1, 2))) for image in batch["images"]]

    def loss(self, outputs, batch):
        return torch.stack(outputs).square().mean()


def test_a_batch_with_an_ambiguous_number_of_samples_is_an_error_unless_the_model_counts_them():
    class Silent(CountingDetector):
        num_samples = Model.num_samples

    batches = [{"images": [torch.rand(3, 4, size) for size in (4, 5)]}] * 4
    with pytest.raises(TypeError, match="it may hold 2 or 3. Override Model.num_samples"):
        make_trainer(model=Silent(), train_dataloader=batches).fit()
    with pytest.raises(TypeError, match="it may hold 2 or 3"):
        make_trainer(model=Silent(), train_dataloader=make_data(), eval_dataloader=batches).eval()
    with make_trainer(model=CountingDetector(), train_dataloader=batches) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.sample == 8
