import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from archive_server import Server, serving, tar_gz
from PIL import Image

from runner import ClassificationModel, Trainer
from runner.data.images.cifar10 import FOLDER, MD5, NORMALIZATION, URL, load_cifar10
from runner.libraries.torchvision import import_torchvision
from runner.models import ResNet8

COUNTS = {**{f"data_batch_{number}": number for number in range(1, 6)}, "test_batch": 7}
NUM_TRAIN, NUM_EVAL = 15, 7
MEAN_STD = NORMALIZATION.tensors(torch.device("cpu"), torch.float32)


def record(label: int, number: int) -> bytes:
    """Return a record of the files: a gray image whose first row encodes its number in red, green and blue."""
    planes = (bytes([value % 256] * 32 + [100] * 992) for value in (number, 2 * number, 3 * number))
    return bytes([label]) + b"".join(planes)


def files() -> dict[str, bytes]:
    """Return all files, with 22 numbered images; the label of an image is the last digit of its number."""
    numbers, contents = iter(range(100)), {}
    for name, count in COUNTS.items():
        contents[f"{FOLDER}/{name}.bin"] = b"".join(record(number % 10, number) for number in islice(numbers, count))
    return contents


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "cifar", files())


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.body = tar_gz({**files(), f"{FOLDER}/readme.html": b"about", f"{FOLDER}/batches.meta.txt": b"names"})
        yield server


def load(folder: Path, **options: Any) -> Any:
    return load_cifar10(**{"path": str(folder), "url": None, "batch_size": 4, "eval_batch_size": 3, **options})


def test_pixels_and_labels_equal_those_of_the_files(folder: Path):
    train, evaluation = load(folder)
    assert (len(train), len(evaluation)) == (4, 3)
    assert (train.order.shuffle, evaluation.order.shuffle) == (True, False)
    assert (train.tensors[0].dtype, train.tensors[0].shape) == (torch.uint8, (NUM_TRAIN, 3, 32, 32))
    numbers: dict[str, list[int]] = {"train": [], "eval": []}
    for split, loader in (("train", train), ("eval", evaluation)):
        for images, labels in loader:
            assert (images.dtype, images.shape[1:], labels.dtype) == (torch.float32, (3, 32, 32), torch.int64)
            pixels = (images * MEAN_STD[1] + MEAN_STD[0]) * 255
            for image, label in zip(pixels, labels.tolist(), strict=True):
                number = round(image[0, 0, 0].item())
                expected = torch.full((3, 32, 32), 100.0)
                expected[:, 0] = torch.tensor([number, 2 * number, 3 * number]).view(3, 1)
                torch.testing.assert_close(image, expected, atol=1e-3, rtol=0)
                assert label == number % 10
                numbers[split].append(number)
    assert sorted(numbers["train"]) == list(range(15)) and numbers["train"] != sorted(numbers["train"])
    assert numbers["eval"] == list(range(15, 22))


def test_the_order_depends_on_the_seed(folder: Path):
    def labels(seed: int) -> torch.Tensor:
        return torch.cat([labels for _, labels in load(folder, seed=seed)[0]])

    assert torch.equal(labels(1), labels(1)) and not torch.equal(labels(1), labels(2))


def test_training_works_after_evaluation_in_inference_mode(folder: Path):
    train, evaluation = load(folder)
    with torch.inference_mode():
        next(iter(evaluation))
    model = ResNet8(in_channels=3, width=2)
    images, labels = next(iter(train))
    torch.nn.functional.cross_entropy(model(images.requires_grad_()), labels).backward()
    assert images.grad is not None


def test_eval_samples_holds_out_the_last_training_images_and_tests_on_the_test_images(folder: Path):
    whole, tested = load(folder)
    train, evaluation, test = load(folder, eval_samples=4)
    assert torch.equal(train.tensors[0], whole.tensors[0][:-4])
    assert torch.equal(evaluation.tensors[0], whole.tensors[0][-4:])
    assert torch.equal(test.tensors[0], tested.tensors[0])
    for call in (load_cifar10, vars(load_cifar10)["fake"]):
        with pytest.raises(
            ValueError, match="eval_samples=15: must be 0, to evaluate on the test images, or at most 14"
        ):
            call(str(folder), url=None, eval_samples=15)


@pytest.mark.parametrize("eval_samples", [0, 4])
def test_fake_loaders_have_the_shapes_lengths_and_range_of_the_real_ones(
    folder: Path, tmp_path: Path, eval_samples: int
):
    fake = vars(load_cifar10)["fake"]
    real = load(folder, eval_samples=eval_samples)
    fakes = fake(str(folder), None, None, 4, 3, eval_samples)
    for loader, fake_loader in zip(real, fakes, strict=True):
        assert len(loader) == len(fake_loader) and loader.order.num_samples == fake_loader.order.num_samples
        for batch, fake_batch in zip(loader, fake_loader, strict=True):
            shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
            assert shapes == [(tensor.shape, tensor.dtype) for tensor in fake_batch]
            pixels = fake_batch[0] * MEAN_STD[1] + MEAN_STD[0]
            assert -1e-6 < pixels.min() < 0.1 and 0.9 < pixels.max() < 1 + 1e-6
            assert set(fake_batch[1].tolist()) == {9}
    unread = fake(str(tmp_path / "none"))
    assert [loader.order.num_samples for loader in unread] == [50_000, 10_000] and not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError, match="is missing; unpack "):
        fake(str(tmp_path / "none"), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"test_batch\.bin has 0 bytes, but must hold one or more records of 3073 bytes; remove it"),
        (
            record(0, 1)[:-1],
            r"test_batch\.bin has 3072 bytes, but must hold one or more records of 3073 bytes; remove it",
        ),
        (record(9, 1) + record(10, 2), r"test_batch\.bin has label 10, but CIFAR-10 has only 0 to 9; remove it"),
    ],
    ids=["empty", "cut off", "label"],
)
def test_a_file_that_is_not_from_cifar10_is_refused(folder: Path, content: bytes, message: str):
    write(folder, {f"{FOLDER}/test_batch.bin": content})
    with pytest.raises(ValueError, match=f"path='{re.escape(str(folder))}': .*{message}"):
        load(folder)


def test_a_missing_file_is_an_error_if_downloads_are_off(folder: Path):
    (folder / FOLDER / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=rf"path='.*': .*data_batch_3\.bin is missing; unpack {URL} in this"):
        load(folder)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"eval_batch_size": -1}, {"seed": -1}, {"url": "x"}, {"md5": "x"}], ids=str
)
def test_wrong_arguments_are_refused_before_a_download(server: Server, tmp_path: Path, wrong: Any):
    ((name, value),) = wrong.items()
    for call in (load_cifar10, vars(load_cifar10)["fake"]):
        with pytest.raises(ValueError, match=f"{name}={value!r}:? must "):
            call(**{"path": str(tmp_path / "new"), "url": server.url, **wrong})
    assert server.requests == 0 and not (tmp_path / "new").exists()


def test_missing_files_are_downloaded_once(server: Server, tmp_path: Path):
    md5 = hashlib.md5(server.body).hexdigest()
    for _ in range(2):
        train, evaluation = load(tmp_path / "new", url=server.url, md5=md5)
        assert (train.order.num_samples, evaluation.order.num_samples) == (NUM_TRAIN, NUM_EVAL)
    assert server.requests == 1
    with pytest.raises(ValueError, match=f"md5='{MD5}': the file from {server.url} has '{md5}'"):
        load(tmp_path / "other", url=server.url, md5=MD5)


def test_a_model_learns_colors(tmp_path: Path):
    generator, images = random.Random(0), []
    for _ in range(60):
        label = generator.randrange(3)
        planes = ([generator.randrange(128 if plane == label else 0, 256) for _ in range(1024)] for plane in range(3))
        images.append(bytes([label]) + b"".join(bytes(plane) for plane in planes))
    names = [f"{FOLDER}/{name}.bin" for name in COUNTS]
    write(tmp_path, {name: b"".join(images[10 * index :][:10]) for index, name in enumerate(names)})
    torch.manual_seed(0)
    train, evaluation = load(tmp_path, batch_size=10, eval_batch_size=10)
    with Trainer(
        model=ClassificationModel(ResNet8(in_channels=3, width=4), 10),
        train_dataloader=train,
        eval_dataloader=evaluation,
        optimizers=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        max_duration="8ep",
        eval_interval=0,
        device="cpu",
    ) as trainer:
        trainer.fit()
        assert trainer.eval()["eval"]["MulticlassAccuracy"] == 1


SHORT = ("data=cifar10", "data.batch_size=5", "model=resnet8", "model.module.in_channels=3", "model.module.width=4")
QUIET = ("callbacks=[checkpoint_saver]", "algorithms.batch_augment.pad=4", "algorithms.batch_augment.flip=random")


def weights(run: Path) -> dict[str, torch.Tensor]:
    assert (run / "checkpoints" / "latest").resolve().name == "ep4-ba12"
    return torch.load(run / "checkpoints" / "latest" / "model.pt", weights_only=True)


@pytest.mark.slow
def test_a_run_downloads_once_and_a_resumed_run_is_bit_identical(run_here: Any, server: Server, tmp_path: Path):
    command = (*SHORT, *QUIET, f"data.url={server.url}", "data.md5=null", "scheduler=constant")
    first = run_here(*command, "trainer.max_duration=4ep", "hydra.run.dir=whole", code=0)
    assert re.search(rf"^INFO: downloading {server.url} \(0\.\d+ MB\) into data/cifar10$", first.err, re.MULTILINE)
    run_here(*command, "trainer.max_duration=7ba", "hydra.run.dir=parts", code=0)
    run_here("resume", "parts", "trainer.max_duration=4ep", code=0)
    assert server.requests == 1 and (tmp_path / "data" / "cifar10" / FOLDER / "test_batch.bin").is_file()
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [("data.batch_size=0",), ("model.module.in_channels=0",), ("data.url=cifar",)])
def test_a_wrong_command_downloads_nothing(run_here: Any, server: Server, tmp_path: Path, wrong: tuple[str]):
    result = run_here(*SHORT, *QUIET, f"data.url={server.url}", *wrong, code=2)
    assert result.err.startswith(f"error: {wrong[0].partition('=')[0]}=") and result.err.count("\n") == 1
    assert server.requests == 0 and not (tmp_path / "data").exists()


def test_the_checkpoint_with_the_lowest_eval_loss_is_tested(run_here: Any, folder: Path):
    command = (
        *SHORT,
        *QUIET,
        f"data.path={folder}",
        "data.url=null",
        "data.eval_samples=5",
        "trainer.max_duration=2ep",
    )
    result = run_here(*command, "test=best", "callbacks.checkpoint_saver.monitor=eval/loss", code=0)
    assert "test/MulticlassAccuracy" in result.out


def own_noise(image: Any) -> Any:
    """Blend an image with a color from numpy's global generator, as a user's own transform might."""
    return Image.blend(image, Image.new("RGB", image.size, tuple(numpy.random.randint(0, 256, 3).tolist())), 0.3)


@pytest.mark.slow
def test_own_transforms_see_the_images_and_draw_by_seed_epoch_and_sample(folder: Path):
    v2 = import_torchvision("torchvision.transforms.v2")
    _, plain = load(folder)
    _, evaluation = load(folder, eval_transforms=[v2.RandomInvert(1)], num_workers=0)
    for (inverted, labels), (images, expected) in zip(evaluation, plain, strict=True):
        pixels = [part * MEAN_STD[1] + MEAN_STD[0] for part in (inverted, images)]
        torch.testing.assert_close(pixels[0], 1 - pixels[1])
        assert torch.equal(labels, expected)

    def batches(epoch: int, first: int = 0, num_workers: int = 0, seed: int = 0) -> list[torch.Tensor]:
        transforms = [own_noise, v2.RandomCrop(32, padding=4), v2.RandAugment()]
        train, _ = load(folder, transforms=transforms, num_workers=num_workers, seed=seed)
        train.seek(epoch, first)
        return [images for images, _ in train]

    whole = batches(1)
    for images, expected in zip(batches(1, first=2, num_workers=1), whole[2:], strict=True):
        assert torch.equal(images, expected)
    assert not torch.equal(torch.cat(batches(0)).sort(0).values, torch.cat(whole).sort(0).values)
    assert not torch.equal(torch.cat(batches(1, seed=5)).sort(0).values, torch.cat(whole).sort(0).values)


def test_transforms_that_are_not_functions_or_return_another_size_are_refused(folder: Path):
    for call in (load_cifar10, vars(load_cifar10)["fake"]):
        with pytest.raises(ValueError, match=r"eval_transforms=\[3\]: must be a list of functions of an image"):
            call(str(folder), url=None, eval_transforms=[3])  # type: ignore[arg-type]
    v2 = import_torchvision("torchvision.transforms.v2")
    with pytest.raises(ValueError, match=r"transforms: they must return .*\(3, 32, 32\), not torch.uint8 \(3, 8, 8\)"):
        next(iter(load(folder, transforms=[v2.CenterCrop(8)], num_workers=0)[0]))


@pytest.mark.slow
def test_a_run_with_own_transforms_is_the_same_on_two_ranks_in_microbatches_and_after_a_resume(
    run_app: Any, run_here: Any, folder: Path, tmp_path: Path
):
    crop = "{_target_: torchvision.transforms.v2.RandomCrop, size: 32, padding: 4}"
    command = (
        *("data=cifar10", "data.batch_size=6", "data.url=null", f"data.path={folder}", f"data.transforms=[{crop}]"),
        *("model=mlp", "model.module.in_features=3072", "algorithms=none", "callbacks=[checkpoint_saver]"),
        *("scheduler=constant", "optimizer.lr=0.01"),
    )
    run_here(*command, "trainer.max_duration=4ep", "hydra.run.dir=whole", code=0)
    run_here(*command, "trainer.max_duration=7ba", "hydra.run.dir=resumed", code=0)
    run_here("resume", "resumed", "trainer.max_duration=4ep", code=0)
    run_app(
        *command, "trainer.max_duration=4ep", "hydra.run.dir=parts", "trainer.grad_accum=3", "launch.nproc_per_node=2"
    )
    torch.testing.assert_close(weights(tmp_path / "resumed"), weights(tmp_path / "whole"), rtol=0, atol=0)
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=1e-4, atol=1e-6)
