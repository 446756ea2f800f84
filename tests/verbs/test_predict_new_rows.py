"""`runner predict RUN --data PATH`: new rows without labels, compared with plain transformers and torchvision."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from python_process import run_python
from tiers import fast
from tiny_bert import WORDS, make_bert

from runner.models.hf.saving import save_pretrained

transformers: Any = pytest.importorskip("transformers")
Image: Any = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.usefixtures("extras")
KINDS = ("bad", "fine", "good")
TEXTS = [" ".join([*WORDS[number : number + 1 + number % 4], 'ÜÄ, "x"']) for number in range(11)]
QUIET = ("data.num_workers=0", "algorithms=none", "optimizer=adamw", "scheduler=none", "callbacks=[checkpoint_saver]")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of texts with one class (`text`) and any number (`many`), of numbers (`value`) and images."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "bert").mkdir()
    make_bert(folder / "bert")
    rows = [
        (f"{WORDS[number % 13]} film", KINDS[number % 3], str([*KINDS[: number % 4]]), number / 7)
        for number in range(40)
    ]
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "kind", "tags", "value"), *rows])
    for number in range(24):
        image = Image.new("RGB", (40, 30), tuple(255 if channel == number % 3 else number for channel in range(3)))
        place = folder / "pictures" / ("val" if number > 17 else "train") / ("red", "green", "blue")[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number}.png")
    shared = ["model=hf_model", f"model.module.name={folder / 'bert'}", "data=hf_dataset", "data.name=csv"]
    shared += [f"data.data_files={folder / 'train.csv'}", "data.eval_split=null", "data.inputs=text", "data.context=6"]
    shared += [f"data.tokenizer={folder / 'bert'}", "trainer.max_duration=2ep", *QUIET, "optimizer.lr=0.01"]
    runs = {
        "text": [*shared, "data.targets=kind"],
        "many": [*shared, "data.targets=tags", "model.multi_label=true"],
        "value": [*shared, "data.targets=value", "model.module.num_labels=1"],
        "image": [
            *("data=imagefolder", f"data.path={folder / 'pictures'}", "data.image_size=16", "data.eval_image_size=16"),
            *("data.batch_size=8", "model=resnet8", "model.num_classes=null", "model.module.in_channels=3", *QUIET),
            *("trainer.max_duration=1ep", "+model.class_weights=balanced"),
        ],
    }
    run_commands([[*arguments, f"hydra.run.dir={name}"] for name, arguments in runs.items()], folder)
    return folder


def run_commands(commands: Iterable[Sequence[str]], folder: Path) -> None:
    """Run `python -m runner ARGUMENTS` for each list of arguments, in one process, so that imports happen once.

    The test fails unless all of them end with 0.
    """
    program = f"""
import sys
from runner.__main__ import main

for arguments in {[[*map(str, command)] for command in commands]!r}:
    sys.argv = ["runner", *arguments]
    if code := main():
        sys.exit(code)
"""
    run_python(["-c", program], cwd=folder, check=True)


def write(path: Path, texts: list[str] | None = None) -> str:
    """Write texts with ids, in the form of the file's suffix."""
    rows = [{"id": f"r{number}", "text": text} for number, text in enumerate(TEXTS if texts is None else texts)]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(row["text"] + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [*csv.DictReader(file)]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pyarrow.parquet.read_table(path).to_pylist()


def by_transformers(work: Path, run: str, folder: Path) -> torch.Tensor:
    """The logits of plain transformers, text by text, for the exported model."""
    exported = save_pretrained(work / run, folder / "exported", tokenizer=str(work / "bert"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    with torch.no_grad():
        batches = [tokenizer(text, truncation=True, max_length=6, return_tensors="pt") for text in TEXTS]
        return torch.cat([model(**batch).logits for batch in batches])


@pytest.mark.parametrize(
    ("suffix", "form"), [(".csv", "jsonl"), (".jsonl", "csv"), (".parquet", "parquet"), (".txt", "jsonl")]
)
def test_texts_of_each_kind_of_file_have_the_predictions_of_transformers(
    work: Path, tmp_path: Path, run_app: Any, run_here: Any, suffix: str, form: str
):
    file = write(tmp_path / f"new{suffix}")
    command = ["predict", str(work / "text"), f"--data={file}", f"--format={form}", "data.eval_batch_size=4"]
    if suffix == ".csv":
        run_app(*command, "launch.nproc_per_node=2", "hydra.run.dir=out")
    else:
        run_here(*command, "hydra.run.dir=out", code=0)
    rows = read(tmp_path / "out" / f"predictions.{form}")
    expected = by_transformers(work, "text", tmp_path).softmax(1)
    assert [row["class"] for row in rows] == [KINDS[number] for number in expected.argmax(1).tolist()]
    assert [int(row["index"]) for row in rows] == [*range(11)]
    if suffix != ".txt":
        assert [row["id"] for row in rows] == [f"r{number}" for number in range(11)]
    if form == "csv":
        probabilities = [[float(row[f"probabilities.{name}"]) for name in KINDS] for row in rows]
    else:
        kept = [row["probabilities"] for row in rows]
        probabilities = [[row[name] for name in KINDS] for row in kept] if form == "jsonl" else kept
    torch.testing.assert_close(torch.tensor(probabilities), expected, rtol=1e-4, atol=1e-5)


def test_any_number_of_classes_and_numbers_are_predicted_too(work: Path, tmp_path: Path, run_here: Any):
    file = write(tmp_path / "new.csv")
    for run in ("many", "value"):
        run_here("predict", str(work / run), f"--data={file}", "--format=jsonl", f"hydra.run.dir={run}", code=0)
        rows = read(tmp_path / run / "predictions.jsonl")
        logits = by_transformers(work, run, tmp_path / f"{run}-exported")
        if run == "value":
            found = torch.tensor([row["prediction"] for row in rows])
            torch.testing.assert_close(found, logits.squeeze(1), rtol=1e-4, atol=1e-5)
            continue
        found = torch.tensor([[row["probabilities"][name] for name in KINDS] for row in rows])
        torch.testing.assert_close(found, logits.sigmoid(), rtol=1e-4, atol=1e-5)
        names = [[name for name, has in zip(KINDS, row, strict=True) if has] for row in (logits > 0).tolist()]
        assert [row["class"] for row in rows] == names


def test_a_folder_of_images_has_the_predictions_of_the_evaluation(
    work: Path, tmp_path: Path, run_app: Any, run_here: Any
):
    run = str(work / "image")
    run_here("predict", run, "--format=jsonl", "hydra.run.dir=own", code=0)
    val = work / "pictures" / "val"
    two = ["launch.nproc_per_node=2", "hydra.run.dir=new", "data.eval_batch_size=4"]
    run_app("predict", run, f"--data={val}", "--format=jsonl", *two)
    own, new = (read(tmp_path / name / "predictions.jsonl") for name in ("own", "new"))
    files = sorted(file.relative_to(val).as_posix() for file in val.glob("*/*"))
    assert [row["id"] for row in new] == files and "target" not in new[0]
    for before, after in zip(own, new, strict=True):
        assert after["class"] == before["class"]
        assert after["probabilities"] == pytest.approx(before["probabilities"], abs=1e-6)


@pytest.mark.parametrize("run", fast(["text", "image", "many", "value"], "text", "image"))
def test_the_training_data_may_be_gone_and_the_run_may_have_moved(work: Path, tmp_path: Path, run_here: Any, run: str):
    """The runs were recorded with the absolute paths of their data."""
    shutil.copytree(work / run, tmp_path / "moved")
    shutil.copytree(work / "pictures" / "val", tmp_path / "new")
    file = str(tmp_path / "new") if run == "image" else write(tmp_path / "new.csv")
    run_here("predict", str(work / run), f"--data={file}", "--format=jsonl", "hydra.run.dir=before", code=0)
    gone = [work / "train.csv", work / "pictures"]
    for path in gone:
        path.rename(path.with_name(f"{path.name} elsewhere"))
    try:
        run_here("predict", "moved", f"--data={file}", "--format=jsonl", "hydra.run.dir=after", code=0)
    finally:
        for path in gone:
            path.with_name(f"{path.name} elsewhere").rename(path)
    before, after = (read(tmp_path / name / "predictions.jsonl") for name in ("before", "after"))
    assert before == after and len(after) == (6 if run == "image" else 11)
    assert run == "value" or {str(row["class"]) for row in after} != {"None"}


def test_rows_of_numbers_need_the_training_data(tmp_path: Path, run_here: Any):
    rows = [{"numbers": [float(number), 1.0], "kind": KINDS[number % 3]} for number in range(30)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    pyarrow.parquet.write_table(table.select(["numbers"]), tmp_path / "new.parquet")
    data = ["data=hf_dataset", "data.name=parquet", "data.data_files=train.parquet", "data.eval_split=null"]
    model = ["model=mlp", "model.num_classes=null", "model.module.in_features=2"]
    run_here(
        *(*data, "data.inputs=numbers", "data.targets=kind", *model, *QUIET, "trainer.max_duration=1ep"),
        *("hydra.run.dir=run",),
        code=0,
    )
    predict = ["predict", "run", "--data=new.parquet", "--format=jsonl"]
    run_here(*predict, "hydra.run.dir=out", code=0)
    assert {row["class"] for row in read(tmp_path / "out" / "predictions.jsonl")} <= {*KINDS}
    (tmp_path / "train.parquet").unlink()
    errors = " ".join(run_here(*predict, code=2).err.split())
    assert "train.parquet" in errors and "Traceback" not in errors
    reason = "needs this data of the run too, because only it shows the types of its columns"
    assert f"--data='new.parquet' {reason}" in errors


@pytest.mark.parametrize(
    ("run", "name", "content", "message"),
    [
        ("text", "new.csv", "id,words\n1,the\n", "lacks the column 'text'; its columns are id, words"),
        ("text", "new.csv", "", "holds no rows"),
        ("text", "new.csv", "id,text\n", "holds no rows"),
        ("text", "new.csv", "id,text\n1,the\n2,\n", "row 1 has no value in the column 'text'"),
        ("text", "new.xlsx", "x", "must be a file that ends in .csv, .jsonl, .json, .parquet, .txt"),
        ("text", "new.jsonl", "{", "holds no rows that can be read as a json file"),
        ("text", "", "", "no such file or folder"),
        ("image", "new.csv", "id\n1\n", "holds no image; images end in"),
        ("image", "new.png", "no image", "new.png: cannot be read as an image"),
    ],
)
def test_wrong_data_is_one_error(
    work: Path, tmp_path: Path, run_here: Any, run: str, name: str, content: str, message: str
):
    file = tmp_path / (name or "gone.csv")
    if name:
        file.write_text(content)
    out = tmp_path / "out"
    ended = run_here("predict", str(work / run), f"--data={file}", "hydra.run.dir=out", code=2)
    errors = " ".join(ended.err.split())
    assert message in errors and file.name in errors and "Traceback" not in errors
    assert not [*out.glob("predictions*")] and not [*out.glob(".*partial")]


def test_data_in_memory_and_splits_are_refused(work: Path, run_here: Any):
    digits = ["model=mlp", "trainer.max_duration=1ba", "callbacks=[checkpoint_saver]", "algorithms=none"]
    run_here(*digits, "hydra.run.dir=digits", code=0)
    ended = run_here("predict", "digits", "--data=.", code=2)
    assert "the run's data cannot read new rows; data=imagefolder, data=image_masks" in " ".join(ended.err.split())
    ended = run_here("predict", str(work / "text"), "--data=train.csv", "--split=train", code=2)
    assert "new rows have no splits" in ended.err
