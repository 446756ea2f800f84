"""Streamed data sets: batches equal those of a loaded data set, also on ranks, in workers and after a resume."""

from __future__ import annotations

import copy
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import END, make_tokenizer

from runner import ClassificationModel, Trainer
from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_file
from runner.data.hf.dataset import load_hf_dataset

pytestmark = pytest.mark.usefixtures("extras")

SIZES = {"batch_size": 12, "eval_batch_size": 12, "num_workers": 0, "cache": None, "context": 16}
COUNTS = (40, 13, 29, 25)
"""Rows of the files to train on."""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write four files to train on and one to evaluate on, and return the arguments that load them."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    number = 0
    for name, count in [*((f"train-{file}.jsonl", count) for file, count in enumerate(COUNTS)), ("eval.jsonl", 17)]:
        lines = []
        for _ in range(count):
            x = [number / 100, (number * 7 % 10) / 5]
            text = "the quick brown fox " * (1 + number % 3) + str(number)
            lines.append({"x": x, "n": number, "y": number % 3, "text": text, "name": "ab"[number % 2]})
            number += 1
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    train = [f"train-{file}.jsonl" for file in range(len(COUNTS))]
    return {"name": "json", "data_files": {"train": train, "validation": "eval.jsonl"}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Make a tokenizer with a padding token and a mask token."""
    name = make_tokenizer(tmp_path / "tokenizer")
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(name)
    loaded.pad_token, loaded.mask_token = END, "<mask>"
    loaded.save_pretrained(name)
    return name


def load(**options: Any) -> Any:
    return load_hf_dataset(**{**SIZES, **options})


def stream(**options: Any) -> Any:
    return load(streaming=True, **options)


def flat(batch: Any) -> list[torch.Tensor]:
    return [*(batch.values() if isinstance(batch, dict) else batch)]


def assert_same(batches: list[Any], expected: list[Any]) -> None:
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert type(batch) is type(other) and len(batch) == len(other)
        assert all(torch.equal(left, right) for left, right in zip(flat(batch), flat(other), strict=True))


@pytest.mark.parametrize(
    "columns",
    [
        {"inputs": "x", "targets": "n"},
        {"inputs": "x", "targets": "name", "classes": ["a", "b"]},
        {"inputs": "text", "targets": "y", "tokenizer": ...},
        {"inputs": "text", "task": "masked_lm", "tokenizer": ...},
        {"inputs": "text", "task": "causal_lm", "tokenizer": ...},
        {"text": "text", "tokenizer": ...},
        {"text": "text"},
    ],
    ids=lambda columns: columns.get("task") or "-".join(columns),
)
def test_batches_in_file_order_equal_those_of_a_loaded_data_set(
    rows: dict[str, Any], columns: dict[str, Any], tokenizer: str
):
    columns = columns | ({"tokenizer": tokenizer} if "tokenizer" in columns else {})
    loaded = load(**rows, **columns)
    loaded[0].order.shuffle = False
    for streaming, loader in zip(stream(**rows, **columns, shuffle_buffer=0), loaded, strict=True):
        for _ in range(3):  # epochs, each with different masks
            assert_same([*streaming], [*loader])


def test_seek_does_not_move_an_existing_iterator(rows: dict[str, Any]):
    train = stream(**rows, inputs="x", targets="n", shuffle_buffer=0)[0]
    expected = [*train]
    train.seek(1)
    iterator = iter(train)
    train.seek(1, 2)
    assert_same([*iterator], expected)


@pytest.mark.parametrize(("num_workers", "buffer"), [(0, 5), (0, 0), pytest.param(2, 5, marks=pytest.mark.slow)])
def test_simultaneous_iterations_are_independent(rows: dict[str, Any], num_workers: int, buffer: int):
    train = stream(**rows, inputs="x", targets="n", shuffle_buffer=buffer, num_workers=num_workers)[0]
    epochs = [[*train] for _ in range(2)]
    train.seek(0, 1)
    first = iter(train)
    read = [next(first), next(first)]
    assert_same([*train], epochs[1])
    train.seek(1, 2)
    second = iter(train)
    pairs = [(batch, next(second)) for batch in first]  # alternately
    assert_same([*read, *(batch for batch, _ in pairs)], epochs[0][1:])
    assert_same([batch for _, batch in pairs], epochs[1][2 : 2 + len(pairs)])
    train.seek(0)
    assert_same([*train], epochs[0])


def test_losses_in_file_order_equal_those_of_a_loaded_data_set(rows: dict[str, Any]):
    def losses(loaders: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = ClassificationModel(torch.nn.Linear(2, 3), num_classes=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=loaders[0],
            eval_dataloader=loaders[1],
            max_duration="3ep",
            device="cpu",
            seed=1,
        ) as trainer:
            trainer.fit()
            return {**model.state_dict(), "loss": trainer.state.eval_metric_values["eval"]["loss"]}

    loaded = load(**rows, inputs="x", targets="y")
    loaded[0].order.shuffle = False
    expected = losses(loaded)
    values = losses(stream(**rows, inputs="x", targets="y", shuffle_buffer=0))
    assert values["module.weight"].isfinite().all()
    assert all(torch.equal(torch.as_tensor(values[key]), torch.as_tensor(expected[key])) for key in expected)


@pytest.mark.parametrize(
    ("ranks", "num_workers"),
    [(1, 0), (2, 0), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 2), (2, 2), (3, 0), (3, 2)])],
)
def test_each_row_is_read_once_per_epoch_on_ranks_and_workers(
    rows: dict[str, Any], ranks: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
):
    orders = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        loaders = stream(**rows, inputs="x", targets="n", num_workers=num_workers, shuffle_buffer=5)
        orders.append([[n for _, batch in loader for n in batch.tolist()] for loader in (loaders[0], *loaders)])
    for epoch in range(2):
        read = [n for order in orders for n in order[epoch]]
        assert sorted(read) == [*range(sum(COUNTS))] != read
        assert all(order[epoch] for order in orders)
    assert sorted(n for order in orders for n in order[2]) == [*range(sum(COUNTS), sum(COUNTS) + 17)]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("columns", [{"inputs": "x", "targets": "n"}, {"text": "text"}], ids=["columns", "text"])
def test_an_epoch_can_start_at_any_batch(rows: dict[str, Any], num_workers: int, columns: dict[str, Any]):
    train, _ = stream(**rows, **columns, num_workers=num_workers, shuffle_buffer=5)
    train.seek(1)
    whole = [*train]
    for first in (0, 1, 4, len(whole) - 1, len(whole), len(whole) + 2):
        train.seek(1, first)
        assert_same([*train], whole[first:])
    assert_same([train.last], whole[-1:])  # stands in on a rank that runs out of batches first


def test_the_order_depends_on_seed_and_epoch(rows: dict[str, Any]):
    def order(seed: int, epoch: int) -> list[int]:
        train, _ = stream(**rows, inputs="x", targets="n", seed=seed)
        train.seek(epoch)
        return [n for _, batch in train for n in batch.tolist()]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_workers_that_start_an_epoch_simultaneously_read_that_epoch(
    rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    kind: Any = pytest.importorskip("datasets").IterableDataset
    worker, other = (copy.copy(stream(**rows, inputs="x", targets="n")[0]._pool.batches) for _ in range(2))
    expected = worker[1, 0, False, True]
    worker._stream = other._stream  # workers share the memory that holds the epoch
    start = [lambda: other[1, 0, False, True]]

    def set_epoch(self: Any, epoch: int) -> None:
        change = epoch - self._epoch
        while start:
            start.pop()()
        self._epoch += change

    monkeypatch.setattr(kind, "set_epoch", set_epoch)
    assert_same([worker[1, 0, False, True]], [expected])


def test_images_in_a_folder_are_streamed(rows: dict[str, Any], tmp_path: Path):
    from PIL import Image

    for part in ("train", "test"):
        for number, kind in enumerate(("red", "blue", "red")):
            (tmp_path / "images" / part / kind).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 8 + number), kind).save(tmp_path / "images" / part / kind / f"{number}.png")
    options = {"name": "imagefolder", "data_dir": "images", "inputs": "image", "targets": "label", "image_size": 6}
    loaded = load(**options, eval_split="test")
    assert loaded[0].dataset.classes == ["blue", "red"]
    loaded[0].order.shuffle = False
    for streaming, loader in zip(stream(**options, eval_split="test", shuffle_buffer=0), loaded, strict=True):
        assert streaming.dataset.classes == ["blue", "red"]
        assert_same([*streaming], [*loader])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_and_nothing_is_copied(rows: dict[str, Any], tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    table = pandas.DataFrame({"x": [[0.5] * 100] * 200, "y": 1})
    peaks = []
    for count in (10, 80):  # the files of a shuffled stream are read ten at a time
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            table.to_parquet(tmp_path / str(count) / f"{number}.parquet")
        files = {"train": f"{count}/*.parquet", "validation": f"{count}/0.parquet"}
        train, _ = stream(name="parquet", data_files=files, inputs="x", targets="y", shuffle_buffer=50)
        gc.collect()
        before = pyarrow.total_allocated_bytes()
        peaks.append(max(pyarrow.total_allocated_bytes() for _ in train) - before)
    assert 0 < peaks[1] < 3 * peaks[0]
    assert peaks[1] < 80 * 200 * 100 * 8 / 3  # a third of all rows
    assert not [*(tmp_path / "prepared").rglob("*.arrow")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_split": None}, "eval_split=None: name a split to evaluate on; to draw rows, all rows are needed"),
        ({"split": "train[:10%]"}, "split='train[:10%]': Bad split"),
        ({"eval_split": "test"}, "eval_split='test': Bad split: test. Available splits: ['train', 'validation']"),
        ({"targets": "name"}, "classes=None: a stream does not know the names in advance"),
        ({"targets": "name", "classes": ["a"]}, "classes=['a']: row 1 of its split has 'b' in column 'name'"),
        ({"targets": ["y", "n"]}, "targets=['y', 'n']: must be one column"),
        ({"targets": "missing"}, "targets='missing': no such column"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1: must be a number of rows, at least 0"),
        ({"inputs": None, "targets": None, "text": "text", "eval_tokens": 100}, "eval_tokens=100: leave it out"),
        (
            {"name": "csv", "data_files": {"train": "empty.csv", "validation": "empty.csv"}},
            "split='train': has no rows",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit_a_stream_are_refused(rows: dict[str, Any], options: dict[str, Any], message: str):
    Path("empty.csv").write_text("x,y\n")
    with pytest.raises(ValueError) as caught:
        stream(**{**rows, "inputs": "x", "targets": "y", **options})
    assert message in str(caught.value)


def test_a_saved_data_set_and_an_uneven_batch_are_refused(rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    datasets: Any = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": [1], "y": [2]}).save_to_disk("saved")
    with pytest.raises(ValueError, match="streaming=True: name='saved' was written by save_to_disk"):
        stream(name="saved", inputs="x", targets="y")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="batch_size=15: must be a multiple of the 2 ranks"):
        stream(**rows, inputs="x", targets="y", batch_size=15)


def test_rows_are_checked_as_they_are_read(rows: dict[str, Any], tokenizer: str):
    lines = [json.dumps({"x": [1.0, 2.0], "y": 1, "text": "fox", "name": "a", "n": 0})] * 150
    for column, value, message in (
        ("x", None, "inputs='x': row 107 of its split has no value"),
        ("text", None, "inputs='text': row 107 of its split has no value"),
        ("name", "c", "classes=['a', 'b']: row 107 of its split has 'c' in column 'name'; add it"),
    ):
        wrong = json.dumps({**json.loads(lines[0]), column: value})
        Path("train-0.jsonl").write_text("\n".join([*lines[:107], wrong, *lines[107:]]) + "\n")
        chosen = {"inputs": "text", "tokenizer": tokenizer} if column == "text" else {"inputs": "x"}
        chosen |= {"targets": "name", "classes": ["a", "b"]} if column == "name" else {"targets": "y"}
        train, _ = stream(**rows, **chosen, shuffle_buffer=0)
        with pytest.raises(ValueError) as caught:
            list(train)
        assert message in str(caught.value)
        assert "rows are counted in the order in which they are read" in caught.value.__notes__


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_broken_file_names_the_file(rows: dict[str, Any], num_workers: int):
    line = Path("train-3.jsonl").read_text().splitlines()[0]
    Path("train-0.jsonl").write_text(f"{line}\n" * 150)
    with Path("train-3.jsonl").open("a") as file:
        file.write("{broken\n")
    train, _ = stream(**rows, inputs="x", targets="y", num_workers=num_workers, shuffle_buffer=0)
    with pytest.raises(ValueError, match=r"name='json': datasets cannot load it: .*train-3\.jsonl"):
        list(train)


COMMAND = [
    *("data=hf_dataset", "data.name=json", "data.inputs=x", "data.targets=y", "data.streaming=true"),
    *("data.batch_size=4", "data.shuffle_buffer=5", "data.num_workers=2", "model=mlp", "model.module.in_features=2"),
    *("model.num_classes=3", "algorithms=none", "scheduler=none", "trainer.device=cpu"),
    *("callbacks=[checkpoint_saver]", "trainer.max_duration=2ep"),
]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumed_mid_epoch_is_bit_identical(
    rows: dict[str, Any], run_here: Any, run_app: Any, tmp_path: Path, ranks: int
):
    # Each of two ranks reads one file, and one rank finishes long before the other.
    command = [*COMMAND, "data.data_files={train:[train-0.jsonl,train-1.jsonl],validation:eval.jsonl}"]
    command += ["trainer.eval_interval=0"] if ranks == 1 else [f"launch.nproc_per_node={ranks}"]
    run = partial(run_here, code=0) if ranks == 1 else run_app
    run(*command, "hydra.run.dir=whole")
    whole = weights_of(tmp_path / "whole")
    length = {1: 2 * 14, 2: 2 * 20}[ranks]
    assert find_checkpoint(tmp_path / "whole").name == f"ep2-ba{length}"
    cut = length - 2
    run(*command, "hydra.run.dir=cut", f"trainer.max_duration={cut}ba")
    run("resume", "cut", "trainer.max_duration=2ep")
    resumed = weights_of(tmp_path / "cut")
    assert find_checkpoint(tmp_path / "cut").name == f"ep2-ba{length}"
    assert all(torch.equal(resumed[key], weight) for key, weight in whole.items())


@pytest.mark.slow
def test_commands_on_a_stream(rows: dict[str, Any], run_here: Any, tmp_path: Path):
    command = [*COMMAND, "data.data_files={train:[train-0.jsonl,train-1.jsonl],validation:eval.jsonl}"]
    result = run_here(*command, "+model.class_weights=balanced", code=2)
    assert "class_weights='balanced'" in result.err
    result = run_here(*command, "scheduler=cosine_annealing", code=2)
    assert "the data has no length, so the rate only changes between epochs, and is 0 in the first" in result.err
    assert "ok data" in run_here("check", *command, code=0).out
    run_here(*command, "trainer.max_duration=5ba", "hydra.run.dir=run", code=0)
    result = run_here("resume", "run", "trainer.max_duration=2ep", "data.num_workers=0", code=2)
    assert "was saved mid-epoch" in result.err and "num_workers 2 -> 0" in result.err
    allowed = "data.streaming=false", "--allow-changes", "data.streaming"
    result = run_here("resume", "run", "trainer.max_duration=2ep", *allowed, code=2)
    assert "was saved mid-epoch" in result.err and "streamed" in result.err
    Path("new.jsonl").write_text('{"x": [1.0, 2.0]}\n' * 5)
    assert "5 samples" in run_here("predict", "run", "--data", "new.jsonl", code=0).out
    assert "17 samples" in run_here("predict", "run", code=0).out
