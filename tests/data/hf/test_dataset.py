import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_tokenizer import make_tokenizer

from runner import ClassificationModel, Trainer
from runner.data import DatasetLoader
from runner.data.folds import Folds
from runner.data.hf.dataset import load_hf_dataset
from runner.data.images.normalization import IMAGENET

pytestmark = pytest.mark.usefixtures("extras")

MEAN, STD = IMAGENET.mean, IMAGENET.std
SIZES = {"context": 8, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0, "cache": None}
DEFAULTS = {key: parameter.default for key, parameter in inspect.signature(load_hf_dataset).parameters.items()}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write two files of JSON lines, use a cache for this test alone, and return the arguments that load the files."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    for name, count in (("train", 40), ("eval", 7)):
        lines = [
            {"text": f"{name} row {i}, Öl.\n", "x": [i / 2, -1.0], "n": i, "y": i % 3 == 0, "z": [0] * (i % 3)}
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line | {"s": {"a": 1}}) + "\n" for line in lines))
    return {"name": "json", "data_files": {"train": "train.jsonl", "validation": "eval.jsonl"}}


def load(**options: Any) -> Any:
    return load_hf_dataset(**{**SIZES, **options})


def fake(**options: Any) -> tuple[Any, Any]:
    return vars(load_hf_dataset)["fake"](**{**DEFAULTS, **SIZES, **options})


def shapes(batch: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in batch]


def test_a_column_of_texts_is_packed_into_windows(rows: dict[str, Any]):
    train, evaluation = load(**rows, text="text", context=1)
    content = "".join(f"eval row {i}, Öl.\n" for i in range(7)).encode()
    assert bytes([int(targets[0]) for _, batch in evaluation for targets in batch]) == content[1:]
    assert len(train.order.permutation(0)) == len("".join(f"train row {i}, Öl.\n" for i in range(40)).encode()) - 1


def test_the_end_token_follows_each_row(rows: dict[str, Any], tmp_path: Path):
    name = make_tokenizer(tmp_path / "tokenizer")
    reference: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(name)
    expected = [t for i in range(7) for t in [*reference(f"eval row {i}, Öl.\n")["input_ids"], reference.eos_token_id]]
    options = {**rows, "text": "text", "tokenizer": name, "context": 1, "cache": str(tmp_path / "kept")}
    for _ in range(2):
        _, evaluation = load(**options)
        assert [int(token) for _, batch in evaluation for token in batch] == expected[1:]
        assert len([*tmp_path.glob("kept/*.uint16")]) == 2
    assert next(iter(fake(**options)[0]))[0].max() == 299
    (tmp_path / "train.jsonl").write_text('{"text": "new and longer than the context"}\n')
    (tmp_path / "eval.jsonl").write_text('{"text": "new"}\n')
    load(**options)
    assert len([*tmp_path.glob("kept/*.uint16")]) == 4


def test_numbers_booleans_and_lists_become_tensors(rows: dict[str, Any]):
    train, evaluation = load(**rows, inputs="x", targets="n")
    assert [type(loader) for loader in (train, evaluation)] == [DatasetLoader, DatasetLoader]
    numbers = []
    for inputs, targets in train:
        assert shapes((inputs, targets)) == [(torch.Size([4, 2]), torch.float32), (torch.Size([4]), torch.int64)]
        assert torch.equal(inputs, torch.stack([targets / 2, torch.full((4,), -1.0)], dim=1))
        numbers += targets.tolist()
    assert sorted(numbers) == [*range(40)] != numbers
    _, evaluation = load(**rows, inputs="x", targets="y")
    assert [int(target) for _, targets in evaluation for target in targets] == [1, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("columns", [{"inputs": "x", "targets": "n"}, {"text": "text", "context": 1}], ids=str)
def test_rows_are_held_out_by_seed(rows: dict[str, Any], columns: dict[str, Any]):
    def targets(seed: int, part: int) -> list[int]:
        loader = load(**rows, **columns, eval_split=None, eval_share=0.2, seed=seed)[part]
        loader.seek(0)
        return [target for _, batch in loader for target in batch.flatten().tolist()]

    assert targets(0, 1) == targets(0, 1) != targets(1, 1)
    if "text" not in columns:
        assert len(targets(0, 1)) == 8
        assert sorted(targets(0, 0) + targets(0, 1)) == [*range(40)]


def test_folds_are_stratified_by_the_targets(rows: dict[str, Any]):
    train, evaluation = load(**rows, inputs="x", targets="y")
    Folds(0, 4, stratified=True).apply(train, evaluation)
    labels = [int(target) for _, targets in evaluation for target in targets]
    assert len(labels) == 12 and sum(labels) in (4, 5)  # 17 of 47 rows


@pytest.fixture
def saved(tmp_path: Path, rows: dict[str, Any]) -> Path:
    """Save a data set with `save_to_disk`: images of one color, their labels, and arrays."""
    from PIL import Image

    datasets: Any = pytest.importorskip("datasets")
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    content = {
        "image": [Image.new("RGB" if i % 4 else "RGBA", (10, 12), colors[i % 3]) for i in range(12)],
        "tall": [Image.new("RGB", (10, 12 + i), colors[i % 3]) for i in range(12)],
        "label": [i % 3 for i in range(12)],
        "array": [numpy.full((2, 3), i).tolist() for i in range(12)],
        "nested": [[[1], [2, 3]]] * 12,
        "unknown": [-1] * 12,
        "empty": [None, *range(11)],
    }
    features = {
        "image": datasets.Image(),
        "tall": datasets.Image(),
        "label": datasets.ClassLabel(names=["red", "green", "blue"]),
        "array": datasets.Array2D((2, 3), "float32"),
        "nested": datasets.List(datasets.List(datasets.Value("int32"))),
        "unknown": datasets.ClassLabel(names=["a"]),
        "empty": datasets.Value("int64"),
    }
    split = datasets.Dataset.from_dict(content, features=datasets.Features(features))
    datasets.DatasetDict({"train": split, "test": split}).with_format("numpy").save_to_disk(tmp_path / "saved")
    split.save_to_disk(tmp_path / "one")
    return tmp_path / "saved"


def load_saved(saved: Path, **options: Any) -> tuple[Any, Any]:
    return load(**{"name": str(saved), "eval_split": "test", **options})


@pytest.mark.parametrize(
    ("column", "size", "shape", "num_workers"), [("image", None, (12, 10), 0), ("tall", 6, (6, 6), 1)]
)
def test_images_are_normalized(saved: Path, column: str, size: int | None, shape: tuple[int, int], num_workers: int):
    options = {"inputs": column, "targets": "label", "image_size": size, "num_workers": num_workers}
    for loader in load_saved(saved, **options):
        assert next(iter(loader.untransformed()))[0].dtype == torch.uint8  # the type that is copied to a GPU
        for images, labels in loader:
            assert images.dtype == torch.float32 and images.shape[1:] == (3, *shape)
            expected = (torch.eye(3)[labels] - torch.tensor(MEAN)) / torch.tensor(STD)
            torch.testing.assert_close(images, expected[:, :, None, None].expand_as(images))


def test_the_center_is_cropped():
    from PIL import Image

    from runner.data.hf.columns import image_tensor

    image = Image.new("RGB", (30, 10), (0, 0, 0))
    image.paste((255, 255, 255), (10, 0, 20, 10))
    for size in (10, 5, 20):
        inner = slice(1, -1)  # without the edges, which are blurred
        cut = IMAGENET.apply(image_tensor(image, size))[:, inner, inner] * torch.tensor(STD).view(3, 1, 1)
        torch.testing.assert_close(cut + torch.tensor(MEAN).view(3, 1, 1), torch.ones_like(cut), atol=0.01, rtol=0)


def test_a_model_learns_colors(saved: Path):
    torch.manual_seed(0)
    train, evaluation = load_saved(saved, inputs="tall", targets="label", image_size=4)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    with Trainer(
        model=ClassificationModel(module, 3),
        train_dataloader=train,
        eval_dataloader=evaluation,
        optimizers=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        max_duration="5ep",
        eval_interval=0,
        device="cpu",
    ) as trainer:
        trainer.fit()
        assert trainer.eval()["eval"]["MulticlassAccuracy"] == 1


def test_folders_of_images_are_classes(saved: Path, tmp_path: Path):
    from PIL import Image

    for split in ("train", "validation"):
        for number, name in enumerate(("a", "b")):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("L", (4, 4), 255 * number).save(tmp_path / "images" / split / name / "1.png")
    for options in ({"name": "imagefolder", "data_dir": "images"}, {"name": "images"}):
        _, evaluation = load(**options, inputs="image", targets="label")
        (images, labels) = next(iter(evaluation))
        assert labels.tolist() == [0, 1] and images[1].min() > 0 > images[0].max()


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (["b/1.png", "a/a/1.png"], "no such column; the columns are image"),
        (["1.png", "2.png"], "no row has a label"),
    ],
)
def test_a_folder_of_images_without_labels_is_refused_with_files_found(
    saved: Path, tmp_path: Path, files: list[str], fault: str
):
    from PIL import Image

    for split in ("train", "validation"):
        for file in files:
            (tmp_path / "images" / split / file).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4)).save(tmp_path / "images" / split / file)
    with pytest.raises(ValueError) as raised:
        load(name="imagefolder", data_dir="images", inputs="image", targets="label")
    assert str(raised.value).startswith(f"targets='label': {fault}; images have labels only if all lie in <split>/<cla")
    assert f"but there is {tmp_path / 'images' / 'train' / files[0]}" in str(raised.value)


@pytest.fixture
def tables(rows: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Write two csv files: row 2 of the second has a class of its own in each form, and -100 in `n`."""
    content = "x,name,names,n\n0,cat,\"['cat']\",0\n1,dog,\"['dog', 'cat']\",1\n"
    (tmp_path / "train.csv").write_text(content)
    (tmp_path / "eval.csv").write_text(f"{content}2,cow,\"['cow']\",-100\n")
    return {"name": "csv", "data_files": {"train": "train.csv", "validation": "eval.csv"}, "inputs": "x"}


@pytest.mark.parametrize("targets", ["name", "names"])
def test_a_class_that_only_rows_to_evaluate_have_is_refused(tables: dict[str, Any], targets: str):
    where = f"row 2 of split 'validation' has 'cow' in column '{targets}'"
    for function in (load, fake) if targets == "name" else (load,):
        with pytest.raises(ValueError) as raised:
            function(**tables, targets=targets)
        only = "but the rows to train on only have 'cat', 'dog'; correct the row, or give all names"
        assert str(raised.value) == f"classes=None: {where}, {only}"
    with pytest.raises(ValueError) as raised:
        load(**tables, targets=targets, classes=["dog", "cat"])
    assert str(raised.value) == f"classes=['dog', 'cat']: {where}; add it, or correct the row"
    train, _ = load(**tables, targets=targets, classes=["dog", "cat", "cow"])
    assert train.dataset.classes == ["dog", "cat", "cow"]


@pytest.mark.parametrize("targets", ["name", "names"])
def test_rows_drawn_for_evaluation_may_have_classes_of_their_own(tables: dict[str, Any], targets: str):
    for seed in range(6):
        train, _ = load(**tables | {"data_files": "eval.csv"}, targets=targets, eval_split=None, seed=seed)
        assert train.dataset.classes == ["cat", "cow", "dog"]


def test_a_label_that_is_no_class_number_is_refused(tables: dict[str, Any]):
    train, evaluation = load(**tables, targets="n")
    train.dataset.check_labels(2)
    for dataset, number, label, allowed in (
        (evaluation.dataset, 2, "row 2 of split 'validation' has -100", "from 0 to 1, as the model has 2 classes"),
        (evaluation.dataset, None, "row 2 of split 'validation' has -100", "at least 0"),
        (train.dataset, 1, "row 1 of split 'train' has 1", "from 0 to 0, as the model has 1 classes"),
    ):
        with pytest.raises(ValueError, match=f"targets='n': {label}, but class numbers must be {allowed}; correct"):
            dataset.check_labels(number)


def test_new_images_are_normalized(tmp_path: Path):
    from PIL import Image

    Image.new("RGB", (4, 4), (0, 255, 51)).save(tmp_path / "new.png")
    options = {**DEFAULTS, **SIZES, "inputs": "image", "targets": "label", "image_size": 4}
    rows, arguments = vars(load_hf_dataset)["new_rows"](**options)
    ((images,),) = DatasetLoader(rows.new_rows(tmp_path), shuffle=False, **arguments)
    expected = (torch.tensor([0.0, 1.0, 0.2]) - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(images, expected[None, :, None, None].expand(1, 3, 4, 4))


@pytest.mark.parametrize(
    "columns",
    [
        {"inputs": "image", "targets": "label"},
        {"inputs": "tall", "targets": "label", "image_size": 6},
        {"inputs": "array", "targets": "label"},
    ],
    ids=str,
)
@pytest.mark.parametrize("eval_split", ["test", None])
def test_fake_batches_resemble_real_ones(saved: Path, columns: dict[str, Any], eval_split: str | None):
    options = {**columns, "eval_split": eval_split}
    for real, made_up in zip(load_saved(saved, **options), fake(name=str(saved), **options), strict=True):
        assert (len(real), real.order.num_samples) == (len(made_up), made_up.order.num_samples)
        assert shapes(next(iter(real))) == shapes(batch := next(iter(made_up)))
        assert batch[1].max() == 2


@pytest.mark.parametrize("columns", [{"text": "text"}, {"inputs": "x", "targets": "n"}], ids=str)
def test_fake_batches_of_files_resemble_real_ones(rows: dict[str, Any], columns: dict[str, Any]):
    for real, made_up in zip(load(**rows, **columns), fake(**rows, **columns), strict=True):
        assert abs(real.order.num_samples - made_up.order.num_samples) <= 1  # rows have about the same length
        assert shapes(next(iter(real))) == shapes(next(iter(made_up)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no choice": ({}, "text=None, inputs=None, targets=None: give text, a column for language modeling, or both"),
    "both": ({"text": "text", "inputs": "x"}, "text='text', inputs='x', targets=None: give text"),
    "one": ({"inputs": "x"}, "or both inputs and targets"),
    "column": ({"text": "texts"}, "text='texts': no such column; the columns are text, x, n, y, z, s"),
    "inputs": ({"inputs": "u", "targets": "n"}, "inputs='u': no such column; the columns are text"),
    "no text": ({"text": "n"}, r"text='n': must be a column of texts; this one holds Value\('int64'\)"),
    "texts": ({"inputs": "text", "targets": "n"}, "inputs='text': this column holds texts; set tokenizer="),
    "struct": ({"inputs": "x", "targets": "s"}, "targets='s': this column holds"),
    "ragged": ({"inputs": "z", "targets": "n"}, "inputs='z': its lists have 0 to 2 entries; must be equal in a batch"),
    "split": ({"text": "text", "split": "test"}, r"split='test': Unknown split .* \['train', 'validation'\]"),
    "eval_split": ({"text": "text", "eval_split": "test"}, "eval_split='test': Unknown split"),
    "share": (
        {"text": "text", "eval_split": None, "eval_share": 0},
        "eval_share=0: must be a number above 0 and below 1",
    ),
    "context": (
        {"text": "text", "context": 10**4},
        "context=10000: must be shorter than the text, which has 750 tokens to train on",
    ),
    "image_size": (
        {"inputs": "x", "targets": "n", "image_size": 0},
        "image_size=0: must be a number of pixels, at least 1",
    ),
    "batch_size": (
        {"inputs": "x", "targets": "n", "batch_size": 0},
        "batch_size=0: must be a whole number, at least 1",
    ),
    "no files": ({"text": "text", "data_files": None}, "data_files=None: name='json' needs data_files=<paths>"),
    "lost": ({"text": "text", "data_files": "a.jsonl"}, "name='json': datasets cannot load it: Unable to find '/.*'"),
    "nowhere": ({"text": "text", "name": "/nowhere", "data_files": None}, "name='/nowhere': datasets cannot load it"),
    "broken": (
        {"text": "text", "data_files": "broken.jsonl"},
        "name='json': datasets cannot load it: .*broken.jsonl.*JSON parse error",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_in_one_line(case: str, rows: dict[str, Any], tmp_path: Path):
    (tmp_path / "broken.jsonl").write_text("{no json\n")
    options, message = WRONG[case]
    with pytest.raises((OSError, ValueError), match=message) as raised:
        load(**{**rows, **options})
    assert "\n" not in str(raised.value)
    if case not in ("ragged", "context"):  # these need all rows
        with pytest.raises((OSError, ValueError), match=message):
            fake(**{**rows, **options})


WRONG_FOR_SAVED: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"eval_split": "validation"}, "eval_split='validation': name='saved' has the splits train, test"),
    "one": ({"name": "one"}, "eval_split='test': name='one' has only one split; eval_split=null takes a part of it"),
    "labels": ({"targets": "unknown"}, r"targets='unknown': some rows have no label \(-1\); choose another split"),
    "shapes": ({"inputs": "tall"}, r"inputs='tall': samples have the shapes .*; give image_size=<pixels>"),
    "nested": ({"inputs": "nested"}, "inputs='nested': row [0-9]+ cannot become a tensor: expected sequence"),
    "no value": ({"inputs": "empty"}, "inputs='empty': row 0 of its split has no value"),
}


@pytest.mark.parametrize("case", WRONG_FOR_SAVED)
def test_wrong_arguments_for_saved_data_are_errors(case: str, saved: Path):
    options, message = WRONG_FOR_SAVED[case]
    with pytest.raises(ValueError, match=message):
        for loader in load(**{"name": "saved", "eval_split": "test", "inputs": "image", "targets": "label", **options}):
            list(loader)


def test_no_progress_bar_is_drawn_without_a_terminal(rows: dict[str, Any], capfd: pytest.CaptureFixture[str]):
    load(**rows, text="text")
    assert capfd.readouterr() == ("", "")
    assert not pytest.importorskip("datasets.utils").are_progress_bars_disabled()


def test_one_rank_prepares_the_data_for_all(rows: dict[str, Any], tmp_path: Path, run_ranks: Any):
    def program():
        from importlib import import_module

        from runner.data.hf.dataset import load_hf_dataset

        Json = import_module("datasets.packaged_modules.json.json").Json
        import_module("datasets").config.HF_DATASETS_CACHE = "prepared"
        prepare = Json._prepare_split

        def print_and_prepare(*args, **kwargs):
            print("prepared")
            return prepare(*args, **kwargs)

        Json._prepare_split = print_and_prepare
        files = {"train": "train.jsonl", "validation": "eval.jsonl"}
        train, _ = load_hf_dataset("json", data_files=files, inputs="n", targets="n", num_workers=0)
        print(*(int(target) for _, batch in train for target in batch))

    lines = [rank.stdout.splitlines() for rank in run_ranks(program)]
    assert sorted(len(rank) for rank in lines) == [1, 3]  # one rank prepared two splits
    assert sorted(int(number) for rank in lines for number in rank[-1].split()) == [*range(40)]


def test_a_missing_library_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets is not installed here: pip install -e '\.\[hf\]'"):
        load(text="text")
