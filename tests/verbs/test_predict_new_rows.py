"""`runner predict RUN --data PATH`: predictions for unlabeled rows, compared with transformers and evaluations."""

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
    """A folder with four runs: texts with one label (`text`), several (`many`) or a number (`value`), and images."""
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
        split = folder / "pictures" / ("val" if number > 17 else "train") / ("red", "green", "blue")[number % 3]
        split.mkdir(parents=True, exist_ok=True)
        image.save(split / f"{number}.png")
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
    """Run `python -m runner ARGUMENTS` for each list of arguments in one process, and check that all exit with 0."""
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
    """Write texts with ids, in the format of the file's suffix, and return the path."""
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
    """Return the rows of a file of predictions."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [*csv.DictReader(file)]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pyarrow.parquet.read_table(path).to_pylist()


def by_transformers(work: Path, run: str, folder: Path) -> torch.Tensor:
    """Return the logits of the exported model in plain transformers, computed text by text."""
    exported = save_pretrained(work / run, folder / "exported", tokenizer=str(work / "bert"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    with torch.no_grad():
        batches = [tokenizer(text, truncation=True, max_length=6, return_tensors="pt") for text in TEXTS]
        return torch.cat([model(**batch).logits for batch in batches])


@pytest.mark.parametrize(
    ("suffix", "form"),
    fast([(".csv", "jsonl"), (".jsonl", "csv"), (".parquet", "parquet"), (".txt", "jsonl")], ".csv", ".txt"),
)
def test_texts_of_each_file_format_have_the_predictions_of_transformers(
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


def test_multi_label_and_regression_models_predict_new_texts(work: Path, tmp_path: Path, run_here: Any):
    file = write(tmp_path / "new.csv")
    for run in ("many", "value"):
        run_here("predict", str(work / run), f"--data={file}", "--format=jsonl", f"hydra.run.dir={run}", code=0)
        rows = read(tmp_path / run / "predictions.jsonl")
        logits = by_transformers(work, run, tmp_path / f"{run}-exported")
        if run == "value":
            predictions = torch.tensor([row["prediction"] for row in rows])
            torch.testing.assert_close(predictions, logits.squeeze(1), rtol=1e-4, atol=1e-5)
            continue
        probabilities = torch.tensor([[row["probabilities"][name] for name in KINDS] for row in rows])
        torch.testing.assert_close(probabilities, logits.sigmoid(), rtol=1e-4, atol=1e-5)
        names = [[name for name, has in zip(KINDS, row, strict=True) if has] for row in (logits > 0).tolist()]
        assert [row["class"] for row in rows] == names


def test_new_images_have_the_predictions_of_the_evaluation(work: Path, tmp_path: Path, run_app: Any, run_here: Any):
    run = str(work / "image")
    run_here("predict", run, "--format=jsonl", "hydra.run.dir=evaluation", code=0)
    val = work / "pictures" / "val"
    two_ranks = ["launch.nproc_per_node=2", "hydra.run.dir=new", "data.eval_batch_size=4"]
    run_app("predict", run, f"--data={val}", "--format=jsonl", *two_ranks)
    evaluation, new = (read(tmp_path / name / "predictions.jsonl") for name in ("evaluation", "new"))
    files = sorted(file.relative_to(val).as_posix() for file in val.glob("*/*"))
    assert [row["id"] for row in new] == files and "target" not in new[0]
    for expected, row in zip(evaluation, new, strict=True):
        assert row["class"] == expected["class"]
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)


@pytest.mark.parametrize("run", fast(["text", "image", "many", "value"], "text", "image"))
def test_a_moved_run_predicts_without_its_training_data(work: Path, tmp_path: Path, run_here: Any, run: str):
    """The record of each run has the absolute paths of its data."""
    shutil.copytree(work / run, tmp_path / "moved")
    shutil.copytree(work / "pictures" / "val", tmp_path / "new")
    file = str(tmp_path / "new") if run == "image" else write(tmp_path / "new.csv")
    run_here("predict", str(work / run), f"--data={file}", "--format=jsonl", "hydra.run.dir=before", code=0)
    training_data = [work / "train.csv", work / "pictures"]
    for path in training_data:
        path.rename(path.with_name(f"{path.name} moved"))
    try:
        run_here("predict", "moved", f"--data={file}", "--format=jsonl", "hydra.run.dir=after", code=0)
    finally:
        for path in training_data:
            path.with_name(f"{path.name} moved").rename(path)
    before, after = (read(tmp_path / name / "predictions.jsonl") for name in ("before", "after"))
    assert before == after and len(after) == (6 if run == "image" else 11)
    assert run == "value" or {str(row["class"]) for row in after} != {"None"}


def test_new_rows_of_numbers_need_the_training_data(tmp_path: Path, run_here: Any):
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
    reason = "also needs the run's own data, because only this has the types of the columns"
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
def test_wrong_new_data_are_refused(
    work: Path, tmp_path: Path, run_here: Any, run: str, name: str, content: str, message: str
):
    file = tmp_path / (name or "missing.csv")
    if name:
        file.write_text(content)
    out = tmp_path / "out"
    errors = " ".join(run_here("predict", str(work / run), f"--data={file}", "hydra.run.dir=out", code=2).err.split())
    assert message in errors and file.name in errors and "Traceback" not in errors
    assert not [*out.glob("predictions*")] and not [*out.glob(".*partial")]


def test_in_memory_data_and_splits_of_new_rows_are_refused(work: Path, run_here: Any):
    digits = ["model=mlp", "trainer.max_duration=1ba", "callbacks=[checkpoint_saver]", "algorithms=none"]
    run_here(*digits, "hydra.run.dir=digits", code=0)
    errors = " ".join(run_here("predict", "digits", "--data=.", code=2).err.split())
    assert "the run's data cannot read new rows; data=imagefolder, data=image_masks" in errors
    split = run_here("predict", str(work / "text"), "--data=train.csv", "--split=train", code=2)
    assert "new rows have no splits" in split.err
