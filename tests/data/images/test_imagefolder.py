import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from runner import ClassificationModel, Trainer
from runner.data.images.imagefolder import MEAN, STD, load_imagefolder
from runner.libraries.torchvision import import_torchvision
from runner.models import torchvision_model

COLORS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write twelve training and four evaluation images, each of one color, so all crops look alike."""
    for split, count in (("train", 6), ("val", 2)):
        for name, color in COLORS.items():
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (20 + number, 16), color).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


@pytest.fixture
def torchvision() -> ModuleType:
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return import_torchvision()


def load(folder: Path, **options):
    sizes = {"image_size": 8, "eval_image_size": 12, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}
    return load_imagefolder(str(folder), **{**sizes, **options})


def test_images_are_normalized_and_labeled_by_their_folders(folder: Path, torchvision: ModuleType):
    train, evaluation = load(folder)
    assert (len(train), len(evaluation)) == (3, 2)
    pairs = []
    for loader, size in ((train, 8), (evaluation, 12)):
        for images, labels in loader:
            assert images.shape[1:] == (3, size, size) and images.dtype == torch.float32
            for image, label in zip(images, labels.tolist(), strict=True):
                color = torch.tensor(sorted(COLORS.items())[label][1]) / 255
                expected = ((color - torch.tensor(MEAN)) / torch.tensor(STD)).view(3, 1, 1).expand_as(image)
                torch.testing.assert_close(image, expected)
                pairs.append((size, label))
    assert [pairs.count((8, label)) for label in (0, 1)] == [6, 6]
    assert [label for size, label in pairs if size == 12] == [0, 0, 1, 1]


def test_crops_differ_between_epochs_but_not_between_runs(folder: Path, torchvision: ModuleType):
    for file in folder.glob("train/*/*.png"):
        Image.radial_gradient("L").convert("RGB").save(file)

    def epoch(number: int, **options):
        train, _ = load(folder, **options)
        train.seek(number)
        return torch.cat([images for images, _ in train])

    assert torch.equal(epoch(1), epoch(1, num_workers=1))
    assert not torch.equal(epoch(0).sort(0).values, epoch(1).sort(0).values)
    assert not torch.equal(epoch(1), epoch(1, seed=5))


def test_a_model_of_torchvision_learns_colors(folder: Path, torchvision: ModuleType):
    torch.manual_seed(0)
    train, evaluation = load(folder, image_size=32, eval_image_size=32)
    with Trainer(
        model=ClassificationModel(torchvision_model("squeezenet1_1", 2), 2),
        train_dataloader=train,
        eval_dataloader=evaluation,
        optimizers=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        max_duration="6ep",
        eval_interval=0,
        device="cpu",
    ) as trainer:
        trainer.fit()
        assert trainer.eval()["eval"]["MulticlassAccuracy"] == 1


def test_a_model_that_torchvision_lacks_is_refused(torchvision: ModuleType):
    with pytest.raises(ValueError, match=r"name='resnet51'.*resnet50"):
        torchvision_model("resnet51")


def test_fake_loaders_have_the_shapes_and_lengths_of_the_real_ones(folder: Path, torchvision: ModuleType):
    sizes = {"image_size": 8, "eval_image_size": 12, "batch_size": 4, "eval_batch_size": 3}
    (folder / "val").rename(folder / "test")
    shutil.copytree(folder / "test", folder / "val")
    real = load(folder, test_folder="test")
    fake = vars(load_imagefolder)["fake"](str(folder), "test", **sizes)
    assert len(real) == 3
    for loader, fake_loader in zip(real, fake, strict=True):
        assert len(loader) == len(fake_loader)
        for batch, fake_batch in zip(loader, fake_loader, strict=True):
            shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
            assert shapes == [(tensor.shape, tensor.dtype) for tensor in fake_batch]
            images = fake_batch[0] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
            assert -1e-6 < images.min() < 0.1 and 0.9 < images.max() < 1 + 1e-6  # normalized like real images


def test_folders_with_different_classes_are_refused(folder: Path, torchvision: ModuleType):
    (folder / "val" / "red").rename(folder / "val" / "green")
    with pytest.raises(ValueError, match="same classes, but only one of them has 'green'"):
        load(folder)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"path='.*': the folder .*train is missing; create it, with one"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["image_size", "eval_image_size"])
def test_sizes_below_one_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"{name}=0"):
        load(tmp_path, **{name: 0})


def test_a_missing_library_is_named_with_its_installation(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("torchvision", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[vision\]'"):
        load(folder)
