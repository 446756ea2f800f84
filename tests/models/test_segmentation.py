"""Semantic segmentation: losses, gradients, and metrics equal those of plain torch, for any split of the batch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from shapes_to_segment import CLASSES, draw_shapes
from torch import nn

from runner.checkpoints.files import find_checkpoint, read_file
from runner.data.images.masks import load_image_masks
from runner.models.segmentation import SegmentationModel

pytest.importorskip("torchvision")

pytestmark = pytest.mark.usefixtures("extras")
CONFIG = """
_target_: runner.models.segmentation.SegmentationModel
num_classes: null
classes: null
class_weights: [1, 2, 3]
module: {_target_: torch.nn.Conv2d, in_channels: 3, out_channels: 3, kernel_size: 3, padding: 1}
"""
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write images and masks to the working directory, and return the arguments of a small run."""
    monkeypatch.chdir(tmp_path)
    draw_shapes(tmp_path / "shapes", (12, 5))
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "small.yaml").write_text(CONFIG)
    return [
        *("model=small", "data=image_masks", "data.path=shapes", f"data.classes=[{','.join(CLASSES)}]"),
        *("data.image_size=24", "data.eval_image_size=32", "data.batch_size=6", "data.eval_batch_size=4"),
        *("data.num_workers=0", "algorithms=none", "scheduler=none"),
        *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0"),
        *("callbacks=[checkpoint_saver,console_summary]", "trainer.max_duration=4ep"),
    ]


def weights(run: str) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


def test_microbatches_with_ignored_pixels_give_the_gradient_of_the_batch():
    torch.manual_seed(0)
    model = SegmentationModel(nn.Conv2d(3, 3, 1), 3)
    images, masks = torch.randn(6, 3, 8, 8), torch.randint(3, (6, 8, 8))
    masks[0] = 255  # a microbatch in which all pixels are ignored
    masks[1, :5] = 255
    F.cross_entropy(model.module(images), masks, ignore_index=255).backward()
    weight: Any = model.module.weight
    expected = weight.grad.clone()
    weight.grad = None
    total = model.loss_weight((images, masks))
    for part in ((images[:1], masks[:1]), (images[1:2], masks[1:2]), (images[2:], masks[2:])):
        (model.loss(model(part), part) * model.loss_weight(part) / total).backward()
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.slow
def test_a_whole_a_split_and_a_resumed_run_equal_a_plain_loop(command: list[str], run_app: Any, run_here: Any):
    run_here(*command, "hydra.run.dir=whole", code=0)
    run_app(*command, "hydra.run.dir=split", "trainer.grad_accum=3", "launch.nproc_per_node=2")
    run_here(*command, "hydra.run.dir=resumed", "trainer.max_duration=3ba", code=0)
    run_here("resume", "resumed", "trainer.max_duration=4ep", code=0)
    whole, split, resumed = map(weights, ("whole", "split", "resumed"))
    for name, value in whole.items():
        assert torch.equal(resumed[name], value)
        torch.testing.assert_close(split[name], value, rtol=1e-4, atol=1e-6)

    initial = [*command, "hydra.run.dir=initial", "optimizer.lr=0", "trainer.max_duration=1ba"]
    run_here(*initial, code=0)
    network = nn.Conv2d(3, 3, 3, padding=1)
    network.load_state_dict({name.removeprefix("module."): value for name, value in weights("initial").items()})
    train, evaluation = load_image_masks("shapes", CLASSES, None, 24, 32, 6, 4, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(4):
        train.seek(epoch)
        for images, masks in train:
            optimizer.zero_grad()
            F.cross_entropy(network(images), masks, weight=WEIGHTS, ignore_index=255).backward()
            optimizer.step()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(whole[f"module.{name}"], value, rtol=1e-4, atol=1e-6)

    ended = run_here("eval", "whole", code=0)
    measured = dict(re.findall(r"eval/(\w+) +([\d.]+)", ended.out))
    predictions, masks = (
        torch.cat(part).numpy()
        for part in zip(*((network(images).argmax(1), masks) for images, masks in evaluation), strict=True)
    )
    valid = masks != 255
    ious = [
        ((predictions == label) & (masks == label)).sum() / (((predictions == label) & valid) | (masks == label)).sum()
        for label in range(3)
    ]
    assert float(measured["MeanIoU"]) == pytest.approx(numpy.mean(ious), abs=1e-4)
    assert float(measured["PixelAccuracy"]) == pytest.approx((predictions == masks)[valid].mean(), abs=1e-4)

    run_app("predict", "whole", "hydra.run.dir=out", "launch.nproc_per_node=2")
    table = pyarrow.parquet.read_table("out/predictions.parquet").to_pylist()
    assert (numpy.array([row["prediction"] for row in table]) == predictions).all()
    assert (numpy.array([row["target"] for row in table]) == masks).all()
    Path("shapes/val/images").rename("images")
    shutil.rmtree("shapes")  # predicting other images does not need the run's data
    run_here("predict", "whole", "--data", "images", "hydra.run.dir=new", code=0)
    new = pyarrow.parquet.read_table("new/predictions.parquet").to_pylist()
    assert [row["id"] for row in new] == [f"{number:02}.png" for number in range(5)]
    assert [row["prediction"] for row in new] == [row["prediction"] for row in table]


def test_small_logits_are_resized_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    from runner.models.hf.network import HFNetwork

    small = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4, "decoder_hidden_size": 16}
    network = HFNetwork("segformer", "semantic_segmentation", pretrained=False, num_labels=3, overrides=small)
    model = SegmentationModel(network, 3, inputs={"pixel_values": 0}).eval()
    batch = torch.randn(2, 3, 32, 32), torch.randint(3, (2, 32, 32))
    batch[1][:, :9] = 255
    assert isinstance(network.network, transformers.SegformerForSemanticSegmentation)
    expected = network.network(pixel_values=batch[0], labels=batch[1]).loss
    outputs = model(batch)
    assert outputs.shape == (2, 3, 32, 32)
    torch.testing.assert_close(model.loss(outputs, batch), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "^num_classes=1: "),
        ({"class_weights": [1, 2]}, "^class_weights=.* must be 3 numbers"),
        ({"classes": ["a", "b"]}, "^classes=.* must be 3 different names"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SegmentationModel(nn.Conv2d(3, 3, 1), **{"num_classes": 3, **options})
