import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from runner import ClassificationModel, Trainer
from runner.data.folds import Folds
from runner.data.images.imagefolder import image_transforms, load_imagefolder
from runner.data.images.normalization import IMAGENET
from runner.libraries.torchvision import import_torchvision
from runner.models import torchvision_model

pytestmark = pytest.mark.usefixtures("extras")

MEAN, STD = IMAGENET.mean, IMAGENET.std
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


@pytest.mark.parametrize("size", [(40, 30), (29, 53), (7, 200), (8, 8)])
def test_evaluation_crops_equal_those_of_torchvision(size: tuple[int, int], torchvision: ModuleType):
    v2 = import_torchvision("torchvision.transforms.v2")
    pixels = numpy.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), numpy.uint8)
    image = Image.fromarray(pixels)
    for side in (7, 8, 33):
        expected = v2.Compose([v2.Resize(round(side * 256 / 224)), v2.CenterCrop(side), v2.PILToTensor()])(image)
        assert torch.equal(image_transforms(8, side)[1](image), expected)


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


def test_own_transforms_replace_the_builtin_ones(folder: Path, torchvision: ModuleType):
    v2 = import_torchvision("torchvision.transforms.v2")
    file = folder / "train" / "blue" / "0.png"
    Image.radial_gradient("L").convert("RGB").resize((20, 16)).save(file)
    train, evaluation = load(
        folder, transforms=[v2.CenterCrop(8), v2.RandomInvert(1)], eval_transforms=[v2.Resize([12, 12])]
    )
    with Image.open(file) as image:
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[:, 4:12, 6:14]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    expected = ((255 - pixels.float()) / 255 - mean) / std
    assert sum(torch.allclose(image, expected, atol=1e-5) for images, _ in train for image in images) == 1
    assert {image.shape for images, _ in evaluation for image in images} == {(3, 12, 12)}


def test_folds_evaluate_training_images_without_augmentation(folder: Path, torchvision: ModuleType):
    v2 = import_torchvision("torchvision.transforms.v2")

    def images_of(*loaders) -> list[bytes]:
        return [image.numpy().tobytes() for loader in loaders for images, _ in loader for image in images]

    center = {"eval_transforms": [v2.CenterCrop(8)], "eval_image_size": 8}
    held_out = []
    for number in range(2):
        loaders = load(folder, transforms=[v2.CenterCrop(8), v2.RandomInvert(1)], **center)
        Folds(number, count=2).apply(*loaders)
        held_out += images_of(loaders[1])
    assert sorted(held_out) == sorted(images_of(*load(folder, transforms=[v2.CenterCrop(8)], **center)))


def test_draws_of_own_transforms_depend_only_on_seed_epoch_and_sample(folder: Path, torchvision: ModuleType):
    v2 = import_torchvision("torchvision.transforms.v2")
    for file in folder.glob("train/*/*.png"):
        Image.radial_gradient("L").convert("RGB").save(file)
    augment = v2.RandAugment()

    def batches(epoch: int, first: int = 0, **options):
        train, _ = load(folder, transforms=[own_noise, v2.ToImage(), v2.RandomCrop(8), augment], **options)
        train.seek(epoch, first)
        return [images for images, _ in train]

    whole = batches(1)
    assert len(whole) == 3 and {type(images) for images in whole} == {torch.Tensor}
    for images, expected in zip(batches(1, first=1, num_workers=2), whole[1:], strict=True):  # a batch of each worker
        assert torch.equal(images, expected)
    assert not torch.equal(torch.cat(batches(0)).sort(0).values, torch.cat(whole).sort(0).values)
    assert not torch.equal(torch.cat(batches(1, seed=5)), torch.cat(whole))


@pytest.mark.slow
def test_ranks_draw_different_augmentations_and_repeat_them_after_a_resume(
    folder: Path, torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    v2 = import_torchvision("torchvision.transforms.v2")
    for file in folder.glob("train/*/*.png"):  # all alike, so that only the draws differ
        Image.radial_gradient("L").convert("RGB").save(file)

    def batches(ranks: int, rank: int, first: int = 0, workers: int = 0) -> list[torch.Tensor]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("RANK", str(rank))
        train, _ = load(folder, transforms=[own_noise, v2.RandomCrop(8), v2.RandAugment()], num_workers=workers)
        train.seek(1, first)
        return [images for images, _ in train]

    def sorted_images(parts: list[torch.Tensor]) -> list[bytes]:
        return sorted(image.numpy().tobytes() for images in parts for image in images)

    whole = batches(1, 0)
    shares = [batches(2, rank) for rank in range(2)]
    for number, together in enumerate(whole):
        parts = [share[number] for share in shares]
        assert sorted_images(parts) == sorted_images([together])
        assert len({*sorted_images(parts)}) == 4
    for rank, share in enumerate(shares):
        for resumed, expected in zip(batches(2, rank, first=1, workers=1), share[1:], strict=True):
            assert torch.equal(resumed, expected)


def own_noise(image: Image.Image) -> Image.Image:
    """Add a color from numpy's global generator, as a user's own transform might."""
    return Image.blend(image, Image.new("RGB", image.size, tuple(numpy.random.randint(0, 256, 3).tolist())), 0.1)


@pytest.mark.parametrize("name", ["transforms", "eval_transforms"])
@pytest.mark.parametrize("value", [3, [3], "abc", len], ids=repr)
def test_transforms_that_are_not_a_list_of_functions_are_refused(folder: Path, name: str, value: Any):
    for make in (load_imagefolder, vars(load_imagefolder)["fake"]):
        with pytest.raises(ValueError, match=f"^{name}=.* must be a list of functions"):
            make(str(folder), None, image_size=8, eval_image_size=8, batch_size=4, eval_batch_size=4, **{name: value})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_transforms_to_another_size_or_type_are_refused(folder: Path, torchvision: ModuleType, workers: int):
    v2 = import_torchvision("torchvision.transforms.v2")
    for transforms, actual in (
        ([v2.Resize([9, 8])], r"torch.uint8 \(3, 9, 8\)"),
        ([v2.Resize([8, 8]), v2.Grayscale()], r"torch.uint8 \(1, 8, 8\)"),
        ([v2.Resize([8, 8]), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)], r"torch.float32 \(3, 8, 8\)"),
        ([width_of], "int"),
    ):
        train, _ = load(folder, transforms=transforms, num_workers=workers)
        with pytest.raises(ValueError, match=rf"transforms: they must return .*, not {actual}; resize"):
            next(iter(train))


def width_of(image: Image.Image) -> int:
    return image.width


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
    with pytest.raises(ValueError, match="same classes, but only val has 'green'"):
        load(folder)


def test_an_error_names_the_missing_folder(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"path='.*': the folder .*train is missing; create it, with one"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["image_size", "eval_image_size"])
def test_sizes_below_one_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"{name}=0"):
        load(tmp_path, **{name: 0})


def test_a_missing_library_is_an_error_that_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("torchvision", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[vision\]'"):
        load(folder)
