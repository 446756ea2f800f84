"""Image classifiers logged to MLflow predict the same for a table of images as `runner predict` for image files."""

from __future__ import annotations

import base64
import json
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
from python_process import run_python
from served_models import load, model_folder, serving
from torch import nn

from runner import ClassificationModel, Trainer
from runner.callbacks._mlflow.model_file import write_model
from runner.data.classes import names_of_classes
from runner.data.hf.dataset import load_hf_dataset
from runner.data.images.cifar10 import load_cifar10
from runner.data.images.imagefolder import load_imagefolder
from runner.models import timm_model, torchvision_model

pandas: Any = pytest.importorskip("pandas")
Image: Any = pytest.importorskip("PIL.Image")

NAMES = ("blue", "green", "red")
TRAIN = (
    *("algorithms=none", "optimizer=adamw", "optimizer.lr=0.01", "scheduler=none", "trainer.max_duration=1ep"),
    *("hydra.run.dir=run", "callbacks.mlflow_logger.log_model=last", "callbacks.mlflow_logger.close_timeout=200"),
    "callbacks=[mlflow_logger,checkpoint_saver]",
)
FOLDER = (
    *("data=imagefolder", "data.path=pictures", "data.image_size=12", "data.eval_image_size=16", "data.batch_size=8"),
    *("data.num_workers=0", "model=resnet8", "model.num_classes=null", "model.module.in_channels=3"),
    "model.module.width=4",
)


def draw(folder: Path) -> Path:
    """Write images of three classes in various sizes, modes and orientations, and return the folder for evaluation."""
    generator = numpy.random.default_rng(0)
    for number in range(30):
        channel = number % 3
        pixels = generator.integers(0, 80, (20 + number, 50 - number, 3))
        pixels[..., channel] += 150
        image = Image.fromarray(pixels.astype(numpy.uint8))
        class_folder = folder / "pictures" / ("val" if number > 20 else "train") / NAMES[2 - channel]
        class_folder.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1  # orientation; 1 is upright
        mode = ("RGB", "RGBA", "L", "P")[number % 4]
        suffix = "jpg" if mode == "RGB" else "png"
        image.convert(mode).save(class_folder / f"{number:02}.{suffix}", exif=exif)
    return folder / "pictures" / "val"


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(folder / "predictions.parquet").to_pylist()


def check(predictions: Any, rows: list[dict[str, Any]]) -> None:
    """Compare predictions with rows of `runner predict`, up to rounding, which depends on the batch size."""
    assert predictions["label"].tolist() == [row["class"] for row in rows]
    for score, probabilities, row in zip(predictions["score"], predictions["probabilities"], rows, strict=True):
        assert [*probabilities.values()] == pytest.approx(row["probabilities"], abs=1e-6)
        assert score == max(probabilities.values())


@pytest.fixture
def classifier(run_here: Any, tmp_path: Path) -> Path:
    """The working directory of a run that logged an image classifier."""
    draw(tmp_path)
    run_here(*FOLDER, *TRAIN, code=0)
    return tmp_path


@pytest.mark.slow
def test_paths_bytes_base64_and_arrays_are_predicted_as_by_runner_predict(classifier: Path, run_here: Any):
    run_here("predict", "run", "--data=pictures/val", "hydra.run.dir=new", code=0)
    rows = read_predictions(classifier / "new")
    files = [classifier / "pictures" / "val" / row["id"] for row in rows]
    contents = [file.read_bytes() for file in files]
    model = load(classifier)
    check(model.predict(pandas.DataFrame({"image": files})), rows)
    check(model.predict(pandas.DataFrame({"image": contents * 8})), rows * 8)
    texts = [base64.b64encode(content).decode() for content in contents]
    check(model.predict(pandas.DataFrame({"image": texts})), rows)
    # An array has no EXIF data, so only images that need no rotation can be compared.
    upright = [number for number, file in enumerate(files) if file.suffix == ".jpg" and int(file.stem) % 8 == 0]
    arrays = [numpy.asarray(Image.open(files[number])) for number in upright]
    check(model.predict(pandas.DataFrame({"image": arrays})), [rows[number] for number in upright])
    assert not [path for path in model_folder(classifier).rglob("*") if path.suffix in (".pkl", ".bin", ".pt")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/etc/passwd", "row 1 is not an image: Incorrect padding; give the bytes of an image file"),
        (b"no image", "row 1 is not an image: its format is not one of JPEG, PNG"),
        (Path("gone.png"), "row 1 is not an image: .*No such file"),
        (None, "row 1 is not an image: it is a NoneType; give the bytes of an image file, raw or in base64, a pathlib"),
        (numpy.zeros((4, 4), numpy.float32), "row 1 is not an image: its values are 32-bit floats"),
    ],
)
def test_the_error_for_a_value_that_is_not_an_image_names_its_row(served: Any, value: Any, message: str):
    good = numpy.zeros((20, 20, 3), numpy.uint8)
    with pytest.raises(ValueError, match=message):
        served.predict(None, pandas.DataFrame({"image": [good, value]}))


def test_a_table_without_images_is_refused(served: Any):
    with pytest.raises(ValueError, match="the table has no rows: give at least one, with the image in 'image'"):
        served.predict(None, pandas.DataFrame({"image": []}))
    with pytest.raises(ValueError, match="takes a DataFrame with the image in 'image'"):
        served.predict(None, pandas.DataFrame({"picture": [b""]}))


def serve(model: nn.Module, loaders: tuple[Any, ...], folder: Path, classes: int = 3) -> tuple[Any, torch.Tensor]:
    """Return the served model of an untrained run, and the run's probabilities `(N, C)`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing MLflow gives warnings
        from runner.callbacks._mlflow.served_model import ServedModel
    train, evaluation = loaders
    classifier = ClassificationModel(model, num_classes=classes)
    names = names_of_classes(train)
    if names is not None:
        classifier.name_classes(names)
    with Trainer(
        model=classifier, train_dataloader=train, eval_dataloader=evaluation, run_dir=folder / "run", device="cpu"
    ) as trainer:
        probabilities = torch.cat([outputs.softmax(1) for outputs in trainer.predict(evaluation)])
        entry = write_model(trainer.state, folder / "run", "last")
    assert entry is not None
    served = ServedModel()
    saved = folder / "run" / "mlflow" / "files" / entry["model"] / "image_classifier"
    served.load_context(SimpleNamespace(artifacts={"model": str(saved)}))
    return served, probabilities


def make_network(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("served")
    draw(folder)
    return serve(make_network(), load_imagefolder(str(folder / "pictures"), None, 12, 16, 8, 8, 0), folder)[0]


def make_cifar10(folder: Path) -> tuple[tuple[Any, ...], list[Any]]:
    """Return loaders of data in the format of CIFAR-10, and the images of its test set."""
    (folder / "cifar-10-batches-bin").mkdir()
    records = numpy.random.default_rng(0).integers(0, 256, (6, 1 + 3 * 32 * 32), numpy.uint8)
    records[:, 0] = numpy.arange(6)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records.tofile(folder / "cifar-10-batches-bin" / f"{name}.bin")
    images = records[:, 1:].reshape(6, 3, 32, 32).transpose(0, 2, 3, 1)
    return load_cifar10(str(folder), None, batch_size=6, eval_batch_size=6), [*images]


def make_hf_dataset(folder: Path, size: int | None) -> tuple[tuple[Any, ...], list[Any]]:
    """Return loaders of a Hugging Face data set, and its images."""
    datasets: Any = pytest.importorskip("datasets")
    generator = numpy.random.default_rng(0)
    arrays = [generator.integers(0, 256, (20, 20 + (size or 0) * number, 3), numpy.uint8) for number in range(6)]
    content = {"image": [Image.fromarray(array) for array in arrays], "label": [*range(3)] * 2}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=[*NAMES]))
    rows = datasets.Dataset.from_dict(content, features=features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(folder / "saved")
    options = {"inputs": "image", "targets": "label", "image_size": size, "num_workers": 0}
    return load_hf_dataset(str(folder / "saved"), **options), arrays


def test_a_served_cifar10_model_has_the_probabilities_of_the_run(tmp_path: Path):
    loaders, images = make_cifar10(tmp_path)
    served, expected = serve(make_network(10), loaders, tmp_path, classes=10)
    predictions = served.predict(None, pandas.DataFrame({"image": images}))
    assert predictions["label"].tolist() == [str(number) for number in expected.argmax(1).tolist()]
    torch.testing.assert_close(torch.tensor([[*row.values()] for row in predictions["probabilities"]]), expected)
    prepared = torch.stack([served.model.preparation(Image.fromarray(image)) for image in images])
    assert torch.equal(served.model.preparation.normalized(prepared), next(iter(loaders[1]))[0])


@pytest.mark.parametrize("size", [8, None])
def test_a_served_model_of_an_image_column_has_the_probabilities_of_the_run(tmp_path: Path, size: int | None):
    loaders, images = make_hf_dataset(tmp_path, size)
    served, expected = serve(make_network(), loaders, tmp_path)
    predictions = served.predict(None, pandas.DataFrame({"image": images}))
    assert predictions["label"].tolist() == [NAMES[number] for number in expected.argmax(1).tolist()]
    torch.testing.assert_close(torch.tensor([[*row.values()] for row in predictions["probabilities"]]), expected)
    if size is None:
        with pytest.raises(ValueError, match=r"row 0 has the height and width \(9, 20\), but the model takes \(20, 20"):
            served.predict(None, pandas.DataFrame({"image": [images[0][:9]]}))


@pytest.mark.slow
@pytest.mark.parametrize("make", [timm_model, torchvision_model])
def test_served_networks_of_timm_and_torchvision_have_the_probabilities_of_the_run(make: Any, tmp_path: Path):
    draw(tmp_path)
    torch.manual_seed(0)
    loaders = load_imagefolder(str(tmp_path / "pictures"), None, 24, 32, 8, 9, 0)
    served, expected = serve(make("resnet18", num_classes=3), loaders, tmp_path)
    files = [file for name in NAMES for file in sorted((tmp_path / "pictures" / "val" / name).iterdir())]
    predictions = served.predict(None, pandas.DataFrame({"image": files}))
    torch.testing.assert_close(torch.tensor([[*row.values()] for row in predictions["probabilities"]]), expected)


def test_a_model_with_custom_transforms_takes_tensors_and_logs_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    draw(tmp_path)
    transforms = [lambda image: image.resize((16, 16))]
    train, evaluation = load_imagefolder(str(tmp_path / "pictures"), None, 12, 16, 8, 8, 0, eval_transforms=transforms)
    model = ClassificationModel(make_network(), num_classes=3)
    options: dict[str, Any] = {"train_dataloader": train, "eval_dataloader": evaluation, "device": "cpu"}
    with caplog.at_level(logging.INFO, "runner"), Trainer(model=model, run_dir=tmp_path / "run", **options) as trainer:
        entry = write_model(trainer.state, tmp_path / "run", "last")
    assert entry is not None and entry["inputs"]["shape"] == [-1, 3, 12, 12] and "columns" not in entry
    messages = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert messages == [
        "MLflow: the logged model takes prepared tensors instead of image files, because "
        "data.eval_transforms are not saved with it"
    ]


LOAD = """
import sys

sys.modules["runner"] = None  # as if it were not installed
import mlflow.pyfunc, mlflow.pytorch, pandas, pathlib, torch

folder, *files = sys.argv[1:]
model = mlflow.pyfunc.load_model(folder)
predictions = model.predict(pandas.DataFrame({"image": [pathlib.Path(file) for file in files]}))
assert mlflow.pytorch.load_model(folder)(torch.zeros(2, 3, 16, 16)).shape == (2, 3)
print(model.metadata.signature, predictions["label"].tolist())
"""


@pytest.mark.slow
def test_a_server_and_a_process_without_the_runner_give_the_same_predictions(classifier: Path):
    files = sorted((classifier / "pictures" / "val").glob("*/*"))
    expected = load(classifier).predict(pandas.DataFrame({"image": files})).to_dict("records")
    arguments = ["-c", LOAD, str(model_folder(classifier)), *map(str, files)]
    finished = run_python(arguments, cwd=classifier, check=True)
    assert str([row["label"] for row in expected]) in finished.stdout and "'image': binary" in finished.stdout
    with serving(classifier) as ask:
        texts = [base64.b64encode(file.read_bytes()).decode() for file in files]
        status, answer = ask({"dataframe_split": {"columns": ["image"], "data": [[text] for text in texts]}})
        assert status == 200 and answer["predictions"] == expected
        for wrong in (str(files[0]), "/etc/passwd", [[0, 0], [0, 0]]):
            status, answer = ask({"dataframe_split": {"columns": ["image"], "data": [[wrong]]}})
            assert status == 400 and "root:" not in json.dumps(answer)
        assert ask({"dataframe_records": [{"image": text} for text in texts]}) == (200, {"predictions": expected})
