from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import tiny_trainer
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel, Evaluator, LanguageModel, Model, Trainer
from runner.callbacks import ImageVisualizer, InMemoryLogger
from runner.callbacks._pictures import GAP, palette, with_masks
from runner.pictures.samples import to_pictures


class BrightestRow(nn.Module):
    """Predicts the index of the brightest row of an image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.weight * images.sum(dim=(1, 3))


class Segmenter(Model):
    """Predicts a class for each pixel from channel 0: class 1 for values above 0.5, and class 2 above 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        channel = self.weight * batch["image"][:, 0]
        return torch.stack([torch.full_like(channel, 0.5), channel, 2 * channel - 1.0], dim=1)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["mask"])


def labeled_images(count: int = 6, size: int = 4, channels: int = 1) -> tuple[Tensor, Tensor]:
    """Return images and targets. A target is the index of the brightest row, except that the last target is wrong."""
    classes = torch.arange(count) % size
    images = 0.25 * torch.ones(count, channels, size, size)
    images[torch.arange(count), :, classes] = 1.0
    targets = classes.clone()
    targets[-1] = (targets[-1] + 1) % size
    return images, targets


def make_trainer(batches: list[Any], *callbacks: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": ClassificationModel(BrightestRow(), 4),
        "train_dataloader": batches,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.0),
        "max_duration": "2ep",
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def test_images_of_training_and_evaluation_are_logged_with_captions():
    memory = InMemoryLogger()
    train, evaluation = labeled_images(), labeled_images(3, channels=3)
    evaluators = [
        Evaluator(label="eval", dataloader=[evaluation, train]),
        Evaluator(label="second", dataloader=[train]),
    ]
    visualizer = ImageVisualizer("2ba", num_images=5)
    with make_trainer([train] * 3, visualizer, eval_dataloader=evaluators, loggers=[memory]) as trainer:
        trainer.fit()
    assert [entry["step"] for entry in memory.images["Images/Train"]] == [2, 4, 6]
    assert [entry["step"] for entry in memory.images["Images/Eval"]] == [3, 6]
    assert [entry["step"] for entry in memory.images["Images/second"]] == [3, 6]
    entry = memory.images["Images/Train"][0]
    expected = np.rint(255 * train[0][:5].permute(0, 2, 3, 1).numpy())  # values in [0, 1] are not stretched
    np.testing.assert_array_equal(entry["images"], expected)
    assert entry["images"].dtype == np.uint8
    assert entry["captions"] == [f"target {label}, prediction {label}" for label in (0, 1, 2, 3, 0)]
    entry = memory.images["Images/Eval"][1]
    assert entry["images"].shape == (3, 4, 4, 3)
    assert entry["captions"][2] == "target 3, prediction 2"  # the wrong last target of the first batch


class DarkenAndEncode(Algorithm):
    """Halves the brightness of images, and one-hot encodes their targets."""

    def after_dataloader(self, state, logger):
        images, targets = state.batch
        state.batch = images / 2, nn.functional.one_hot(targets, 4).float()


def test_images_are_logged_after_algorithms_change_them():
    memory = InMemoryLogger()
    arguments = {"algorithms": [DarkenAndEncode()], "loggers": [memory], "max_duration": "1ba"}
    with make_trainer([labeled_images()], ImageVisualizer("1ba"), **arguments) as trainer:
        trainer.fit()
    (entry,) = memory.images["Images/Train"]
    np.testing.assert_array_equal(entry["images"][1, :, 0, 0], [32, 128, 32, 32])
    assert entry["captions"][1] == "target 1, prediction 1"  # the most probable class of a soft target


def test_images_and_predictions_come_from_the_last_microbatch():
    memory = InMemoryLogger()
    with make_trainer([labeled_images()], ImageVisualizer("1ep"), loggers=[memory], grad_accum=3) as trainer:
        trainer.fit()
    first, second = memory.images["Images/Train"]
    assert first["captions"] == ["target 0, prediction 0", "target 2, prediction 1"]
    assert (first["step"], second["step"]) == (1, 2)
    np.testing.assert_array_equal(first["images"][0, :, 0, 0], [255, 64, 64, 64])


def test_masks_are_drawn_beside_the_image():
    memory = InMemoryLogger()
    images = torch.zeros(2, 3, 5, 6)
    images[0, 0, 1:3, 1:3] = 0.8  # predicted as class 1
    images[1, 0, 2, :] = 1.6  # predicted as class 2
    mask = torch.zeros(2, 5, 6, dtype=torch.int64)
    mask[0, 1:3, 1:4] = 1
    mask[1, 0, 0] = -100
    visualizer = ImageVisualizer("1ba", mode="segmentation", input_key="image", target_key="mask")
    arguments = {"model": Segmenter(), "loggers": [memory], "max_duration": "1ba"}
    with make_trainer([{"image": images, "mask": mask}], visualizer, **arguments) as trainer:
        trainer.fit()
    (entry,) = memory.images["Images/Train"]
    assert entry["captions"] is None
    pictures = entry["images"]
    assert pictures.shape == (2, 5, 18 + 2 * GAP, 3)
    panels = [pictures[:, :, start : start + 6].astype(int) for start in (0, 6 + GAP, 12 + 2 * GAP)]
    np.testing.assert_array_equal(panels[0], to_pictures(images))
    colored = [(panel != panels[0]).any(axis=-1) for panel in panels[1:]]
    np.testing.assert_array_equal(colored[0], mask.numpy() == 1)
    np.testing.assert_array_equal(colored[1], images[:, 0].numpy() > 0.5)
    blended = panels[0][1, 2, 0] // 2 + palette(3)[2].astype(int) // 2
    np.testing.assert_array_equal(panels[2][1, 2, 0], blended)


def test_colors_differ_and_do_not_depend_on_the_number_of_classes():
    colors = palette(30)
    assert len({tuple(color) for color in colors}) == 30
    np.testing.assert_array_equal(palette(5), colors[:5])
    assert with_masks(np.zeros((1, 3, 4, 1), np.uint8), []).shape == (1, 3, 4, 3)  # gray pictures become RGB


def test_uint8_images_with_channels_last_are_logged_unchanged():
    memory = InMemoryLogger()
    images, targets = labeled_images()

    class ChannelsLast(BrightestRow):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.permute(0, 3, 1, 2).float())

    pixels = (200 * images.permute(0, 2, 3, 1)).to(torch.uint8).contiguous()
    visualizer = ImageVisualizer("1ba", channels_last=True)
    arguments = {"model": ClassificationModel(ChannelsLast(), 4), "loggers": [memory], "max_duration": "1ba"}
    with make_trainer([(pixels, targets)], visualizer, **arguments) as trainer:
        trainer.fit()
    (entry,) = memory.images["Images/Train"]
    np.testing.assert_array_equal(entry["images"], pixels.numpy())
    assert entry["captions"][-1] == "target 2, prediction 1"


def test_data_without_images_gives_one_warning(caplog):
    memory = InMemoryLogger()
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model = LanguageModel(nn.Embedding(3, 3))
    with make_trainer([(tokens, tokens)] * 4, ImageVisualizer("1ba"), model=model, loggers=[memory]) as trainer:
        trainer.fit()
    visualizer = ImageVisualizer("1ba", mode="segmentation", target_key=0)
    with make_trainer([labeled_images()], visualizer, loggers=[memory]) as trainer:
        trainer.fit()
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "inputs of shape (2, 4) are not images (N, C, H, W) with 1 or 3 channels"
    ]
    assert list(memory.images) == ["Images/Train"]  # of the second run, whose targets are the images themselves


def test_segmentation_without_masks_gives_one_warning(caplog):
    memory = InMemoryLogger()
    with make_trainer([labeled_images()], ImageVisualizer("1ba", mode="segmentation"), loggers=[memory]) as trainer:
        trainer.fit()
    assert len(caplog.messages) == 1
    assert "neither targets nor predictions are masks" in caplog.messages[0]
    assert memory.images == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_key": 2}, "input_key=2: a batch has the keys 0, 1"),
        ({"target_key": "x"}, "target_key='x': a batch has the keys 0, 1"),
    ],
)
def test_a_key_that_is_not_in_the_batch_is_rejected(arguments: dict[str, Any], message: str):
    trainer = make_trainer([labeled_images()], ImageVisualizer("1ba", **arguments))
    with pytest.raises(ValueError, match=message):
        trainer.fit()


def test_only_rank_0_logs_images_from_its_share_of_the_batch(run_ranks):
    def program() -> None:
        import torch
        from tiny_runs import tiny_trainer

        from runner import ClassificationModel, get_global_rank
        from runner.callbacks import ImageVisualizer, InMemoryLogger
        from runner.data import TensorLoader

        images = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 1, 2, 2) / 8
        data = TensorLoader(images, torch.arange(8) % 2, batch_size=4, shuffle=False)
        model = ClassificationModel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), 2)
        arguments = {"model": model, "train_dataloader": data, "eval_dataloader": data}
        loggers = [memory := InMemoryLogger()]
        with tiny_trainer(ImageVisualizer("1ba"), loggers=loggers, **arguments) as trainer:
            trainer.fit()
        if get_global_rank() == 0:
            assert [len(entry["images"]) for entry in memory.images["Images/Train"]] == [2, 2]
            assert len(memory.images["Images/Eval"]) == 1
        else:
            assert memory.images == {}

    run_ranks(program)


@pytest.mark.parametrize("arguments", [{"mode": "masks"}, {"num_images": 0}, {"num_images": 2.0}, {"interval": "now"}])
def test_invalid_arguments_are_rejected(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError) as caught:
        ImageVisualizer(**arguments)
    assert str(caught.value).startswith(f"{name}={value!r}")


def test_captions_show_all_digits_of_a_class_number():
    memory = InMemoryLogger()
    images, _ = labeled_images(3)
    batch = {"image": images, "label": torch.tensor([9999, 12345, 21840]), "mask": torch.zeros(3, 4, 4).long()}
    visualizer = ImageVisualizer("1ba", input_key="image", target_key="label")
    with make_trainer([batch], visualizer, model=Segmenter(), max_duration="1ba", loggers=[memory]) as trainer:
        trainer.fit()
    assert memory.images["Images/Train"][0]["captions"] == ["target 9999", "target 12345", "target 21840"]


def test_captions_show_class_names_if_the_model_has_them():
    memory = InMemoryLogger()
    model = ClassificationModel(BrightestRow(), 4, classes=["one", "two", "three", "four"])
    visualizer = ImageVisualizer("1ba", num_images=6)
    with make_trainer([labeled_images()], visualizer, model=model, max_duration="1ba", loggers=[memory]) as trainer:
        trainer.fit()
    captions = memory.images["Images/Train"][0]["captions"]
    assert captions[1] == "target two, prediction two" and captions[5] == "target three, prediction two"
