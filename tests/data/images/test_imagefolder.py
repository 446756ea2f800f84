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
    """Twelve images to train on and four to evaluate on, of one color each: whatever part is drawn, it looks alike."""
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
    seen = []
    for loader, size in ((train, 8), (evaluation, 12)):
        for images, labels in loader:
            assert images.shape[1:] == (3, size, size) and images.dtype == torch.float32
            for image, label in zip(images, labels.tolist(), strict=True):
                color = torch.tensor(sorted(COLORS.items())[label][1]) / 255
                expected = ((color - torch.tensor(MEAN)) / torch.tensor(STD)).view(3, 1, 1).expand_as(image)
                torch.testing.assert_close(image, expected)
                seen.append((size, label))
    assert [seen.count((8, label)) for label in (0, 1)] == [6, 6]
    assert [label for size, label in seen if size == 12] == [0, 0, 1, 1]


def test_parts_differ_between_epochs_and_not_between_runs(folder: Path, torchvision: ModuleType):
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


def test_the_stand_in_has_the_shapes_and_numbers_of_the_real_loaders(folder: Path, torchvision: ModuleType):
    sizes = {"image_size": 8, "eval_image_size": 12, "batch_size": 4, "eval_batch_size": 3}
    (folder / "val").rename(folder / "test")
    shutil.copytree(folder / "test", folder / "val")
    real = load(folder, test_folder="test")
    fake = vars(load_imagefolder)["fake"](str(folder), "test", **sizes)
    assert len(real) == 3
    for one, other in zip(real, fake, strict=True):
        assert len(one) == len(other)
        for batch, made_up in zip(one, other, strict=True):
            assert [(x.shape, x.dtype) for x in batch] == [(x.shape, x.dtype) for x in made_up]
            images = made_up[0] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
            assert -1e-6 < images.min() < 0.1 and 0.9 < images.max() < 1 + 1e-6  # normalized as the real ones are


def test_folders_with_other_classes_are_refused(folder: Path, torchvision: ModuleType):
    (folder / "val" / "red").rename(folder / "val" / "green")
    with pytest.raises(ValueError, match="same classes, but only one of them has 'green'"):
        load(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"path='.*': the folder .*train is missing; create it, with one"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["image_size", "eval_image_size"])
def test_sizes_below_one_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"{name}=0"):
        load(tmp_path, **{name: 0})


def test_what_to_install_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("torchvision", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[vision\]'"):
        load(folder)
