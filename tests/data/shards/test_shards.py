"""Local shards of every format, read by loaders."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from limited_files import limited_files
from python_process import wait_until
from shard_files import SIZES, write_parquet, write_tar, write_tars, write_tokens

from runner.data.shards.parquet_shards import load_parquet_shards
from runner.data.shards.tar_shards import load_tar_shards
from runner.data.shards.token_shards import load_token_shards
from runner.files.lock import exclusive_lock, size_of


def write_arrow(folder: Path, sizes: Sequence[int] = SIZES, stream: bool = False, compression: str | None = None):
    """Write the samples of `write_parquet` as arrow files or streams."""
    pyarrow = __import__("pyarrow.parquet")
    ipc = __import__("pyarrow.ipc").ipc
    options = ipc.IpcWriteOptions(compression=compression)
    for path in write_parquet(folder, sizes):
        table = pyarrow.parquet.read_table(path)
        path.unlink()
        make = ipc.new_stream if stream else ipc.new_file
        with make(str(path.with_suffix(".arrow")), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=3)


KINDS: dict[str, tuple[Any, Callable[[Path], Any], dict[str, Any]]] = {
    "parquet": (load_parquet_shards, write_parquet, {}),
    "arrow": (load_parquet_shards, write_arrow, {}),
    "arrow stream": (load_parquet_shards, lambda folder: write_arrow(folder, stream=True), {}),
    "arrow, compressed": (load_parquet_shards, lambda folder: write_arrow(folder, compression="zstd"), {}),
    "tar": (load_tar_shards, write_tars, {"inputs": "npy"}),
    "tokens": (load_token_shards, write_tokens, {"context": 4}),
}
SAMPLES = sum(SIZES)


@pytest.fixture(params=KINDS)
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Write shards of a format, and return a function that loads them."""
    load, arguments = write_format(request.param, tmp_path)
    return lambda **options: load(**arguments | options)


def write_format(kind: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Write shards of a format, and return the function that loads them, with its arguments."""
    load, write, arguments = KINDS[kind]
    (folder / "shards").mkdir()
    write(folder / "shards")
    return load, arguments_of(folder) | arguments


def arguments_of(folder: Path) -> dict[str, Any]:
    sizes = {"batch_size": 5, "eval_batch_size": 4, "num_workers": 0, "shuffle_shards": 2, "cache_gb": 0.1}
    return {**sizes, "path": str(folder / "shards"), "cache_dir": str(folder / "cache")}


def numbers(batch: Any) -> list[int]:
    return batch[0][:, 0].int().tolist()


def test_samples_equal_the_content_of_the_files(shards: Callable[..., Any]):
    train, evaluation = shards(eval_shards=2)
    samples = [number for batch in train for number in numbers(batch)]
    assert sorted(samples) == [*range(SAMPLES - 20)] and samples != sorted(samples)
    assert samples == train.order.permutation(0).tolist()
    assert [number for batch in evaluation for number in numbers(batch)] == [*range(SAMPLES - 20, SAMPLES)]
    inputs, targets = next(iter(evaluation))
    first = SAMPLES - 20
    if inputs.dtype == torch.float32:
        assert inputs[1].tolist() == [first + 1, (first + 1) % 3, 0.5, -1.0]
        assert targets.tolist() == [number % 3 for number in range(first, first + 4)] and targets.dtype == torch.int64
    else:
        assert inputs[1].tolist() == [first + 1] * 4 and targets[1].tolist() == [first + 1] * 3 + [first + 2]


def test_batches_are_the_same_with_workers_after_a_seek_and_on_ranks(
    shards: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    train, _ = shards()
    whole = [*train]
    train.seek(0, 3)
    torch.testing.assert_close([*train], whole[3:], rtol=0, atol=0)
    workers, _ = shards(num_workers=2)
    assert [numbers(batch) for batch in workers] == [numbers(batch) for batch in whole]
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        parts.append([numbers(batch) for batch in shards()[0]])
    batches_of_ranks = [first + second for first, second in zip(*parts, strict=True)]
    assert batches_of_ranks[:-1] == [numbers(batch) for batch in whole][:-1]


def test_pick_returns_samples_in_the_order_of_the_indices(shards: Callable[..., Any]):
    train, _ = shards()
    assert numbers(train.pick(torch.tensor([20, 3, 3, 37]))) == [20, 3, 3, 37]


@pytest.mark.parametrize("kind", ["parquet", "tar", "tokens"])
def test_fake_batches_resemble_real_ones(kind: str, tmp_path: Path):
    load, options = write_format(kind, tmp_path)
    for real, fake in zip(load(**options), load.fake(**options), strict=True):
        assert len(real) == len(fake)
        for tensor, fake_tensor in zip(next(iter(real)), next(iter(fake)), strict=True):
            assert (tensor.shape, tensor.dtype) == (fake_tensor.shape, fake_tensor.dtype)
    assert next(iter(load.fake(**options)[0]))[1].max() == (2 if kind != "tokens" else 16)


@pytest.mark.parametrize("kind", ["parquet", "tar", "tokens"])
def test_only_the_current_and_the_next_shards_are_decoded(kind: str, tmp_path: Path):
    load, arguments = write_format(kind, tmp_path)
    train, _ = load(**arguments)
    train.seek(0, 2)
    next(iter(train))
    for thread in train._keys._threads:
        thread.join(60)
    cached = {*(tmp_path / "cache").glob("*.shard")}
    # Two shards of this group and two of the next; the other formats are read in place.
    assert len(cached) == (4 if kind == "parquet" else 0)


def test_the_cache_stays_within_its_size(tmp_path: Path):
    (tmp_path / "shards").mkdir()
    write_parquet(tmp_path / "shards", [200] * 12)
    arguments = arguments_of(tmp_path)
    train, _ = load_parquet_shards(**arguments)
    expected = [numbers(batch) for batch in train]
    size = max(file.stat().st_size for file in (tmp_path / "cache").glob("*.shard"))
    shutil.rmtree(tmp_path / "cache")
    largest = 0.0
    train, _ = load_parquet_shards(**{**arguments, "cache_gb": 5 * size / 1e9})
    batches = []
    for batch in train:
        batches.append(numbers(batch))
        with exclusive_lock(tmp_path / "cache" / "room.lock", "is measured", lambda: 0):  # so no thread makes room
            largest = max(largest, size_of(tmp_path / "cache", "*.shard"))
    assert batches == expected and size < largest <= 5 * size


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_files_of_the_cache_are_made_again(damage: str, tmp_path: Path):
    (tmp_path / "shards").mkdir()
    write_parquet(tmp_path / "shards")
    expected = [numbers(batch) for batch in load_parquet_shards(**arguments_of(tmp_path))[0]]
    for file in (tmp_path / "cache").glob("*.shard"):
        file.write_bytes(file.read_bytes()[:100]) if damage == "cut" else file.unlink()
    assert [numbers(batch) for batch in load_parquet_shards(**arguments_of(tmp_path))[0]] == expected


def test_class_names_and_images_become_tensors(tmp_path: Path):
    image_of = pytest.importorskip("PIL.Image")
    (tmp_path / "shards").mkdir()

    def images(numbers: range) -> list[bytes]:
        files = [io.BytesIO() for _ in numbers]
        for file, number in zip(files, numbers, strict=True):
            image_of.new("RGB", (9, 8), (number, 0, 0)).save(file, "png")
        return [file.getvalue() for file in files]

    write_parquet(tmp_path / "shards", image=images, name=lambda numbers: [f"c{number % 2}" for number in numbers])
    columns = {"inputs": "image", "targets": "name", "image_size": 6}
    _, evaluation = load_parquet_shards(**arguments_of(tmp_path), **columns, classes=["c0", "c1"])
    pictures, classes = next(iter(evaluation))
    assert pictures.shape == (4, 3, 6, 6) and classes.tolist() == [0, 1, 0, 1]
    assert pictures[1, 0, 0, 0] == pytest.approx(((SAMPLES - 10) / 255 - 0.485) / 0.229, abs=1e-6)
    with pytest.raises(ValueError, match="targets='name': classes lacks 'c1', which a row has; add it"):
        list(load_parquet_shards(**arguments_of(tmp_path), **columns, classes=["c0"])[1])
    with pytest.raises(ValueError, match="image_size=0: must be a number of pixels, at least 1"):
        load_parquet_shards(**arguments_of(tmp_path), **{**columns, "image_size": 0})


def test_images_in_tar_files_are_augmented_alike_with_and_without_a_worker(tmp_path: Path):
    pytest.importorskip("torchvision")
    image_of = pytest.importorskip("PIL.Image")
    (tmp_path / "shards").mkdir()
    generator = random.Random(0)
    for shard in range(3):
        files = {}
        for number in range(8):
            file = io.BytesIO()
            image_of.frombytes("L", (20, 18), generator.randbytes(360)).save(file, "png")
            files |= {f"{number}.png": file.getvalue(), f"{number}.cls": b"1"}
        write_tar(tmp_path / "shards" / f"{shard}.tar", files)
    options = {**arguments_of(tmp_path), "inputs": "png", "image_size": 10, "eval_image_size": 12}
    loaders = [load_tar_shards(**{**options, "num_workers": number})[0] for number in (0, 1)]
    batches, of_worker = ([images for images, _ in loader] for loader in loaders)
    torch.testing.assert_close(batches, of_worker, rtol=0, atol=0)
    assert batches[0].shape == (5, 3, 10, 10) and batches[0].dtype == torch.float32
    assert next(iter(load_tar_shards(**options)[1]))[0].shape == (4, 3, 12, 12)


def damage_shard(folder: Path, damage: str) -> None:
    """Damage the second shard of a folder, or replace it by a shard that does not fit."""
    second = sorted(folder.iterdir())[1]
    content = second.read_bytes()
    if damage == "torn":
        second.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        second.write_bytes(content[:60] + bytes(200) + content[260:])
    elif damage == "empty":
        (write_parquet if second.suffix == ".parquet" else write_tokens)(folder, [4, 0, 4])
    elif damage == "other columns":
        (folder / "other").mkdir()
        write_parquet(folder / "other", [4], targets=lambda numbers: [0.5 for _ in numbers])[0].rename(second)
        (folder / "other").rmdir()
    elif damage == "hostile":
        write_tar(second, {"../../etc/passwd.npy": b"x", "../../etc/passwd.cls": b"1"})
    elif damage == "unnamed":
        write_tar(second, {"readme": b"x"})
    elif damage == "scattered":
        write_tar(second, {"1.npy": b"x", "2.npy": b"x", "1.cls": b"1"})
    elif damage == "no field":
        write_tar(second, {"1.npy": b"x", "1.cls": b"1", "2.npy": b"x"})
    elif damage == "cut between members":
        second.write_bytes(content[: 512 * 2])
    elif damage == "odd":
        second.write_bytes(content[:-1])


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("parquet", "torn", "001.parquet': not a readable parquet or arrow file"),
        ("parquet", "flipped", "001.parquet': a damaged parquet or arrow file"),
        ("parquet", "empty", "001.parquet': it contains no samples; leave it out"),
        ("parquet", "other columns", "001.parquet': has double in column 'targets', where '"),
        ("arrow", "torn", "001.arrow': not a readable parquet or arrow file"),
        ("tar", "torn", "001.tar': member 'some/00015.cls': the file ends within it|not a readable tar|has no end"),
        ("tar", "cut between members", "001.tar': "),
        ("tar", "hostile", "001.tar': member '../../etc/passwd.npy': must be a plain file, with a name that stays"),
        ("tar", "unnamed", "001.tar': member 'readme': must be named <sample>.<field>"),
        ("tar", "scattered", "001.tar': member '1.cls': its sample occurs twice"),
        ("tar", "no field", "001.tar': has no column 'cls', only npy"),
        ("tokens", "odd", "001.uint16': 57 bytes are not a multiple of uint16"),
        ("tokens", "empty", "001.uint16': it contains no samples; leave it out"),
    ],
)
def test_an_error_names_the_bad_shard(kind: str, damage: str, message: str, tmp_path: Path):
    load, arguments = write_format(kind, tmp_path)
    damage_shard(tmp_path / "shards", damage)
    with pytest.raises(ValueError, match=message):
        list(load(**arguments)[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"path": "nowhere/*.parquet"}, FileNotFoundError, "path='nowhere/\\*.parquet': no shards found"),
        ({"eval_shards": 5}, ValueError, "eval_shards=5: there are 5 shards in total"),
        ({"cache_gb": 1e-7}, ValueError, "cache_gb=1e-07: must hold the shards that are read at a time; the largest 2"),
        ({"cache_gb": 0}, ValueError, "cache_gb=0: must be a number above 0"),
        ({"cache_dir": "/dev/null/cache"}, OSError, "cache_dir='/dev/null/cache': cannot be written to"),
        ({"shuffle_shards": 0}, ValueError, "shuffle_shards=0"),
        ({"inputs": "x"}, ValueError, "000.parquet': has no column 'x', only inputs, targets"),
        ({"path": "s4://a/b.parquet"}, ValueError, "path='s4://a/b.parquet': no such protocol; use s3, gs"),
    ],
)
def test_a_wrong_argument_is_an_error(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path):
    (tmp_path / "shards").mkdir()
    write_parquet(tmp_path / "shards")
    with pytest.raises(error, match=message):
        load_parquet_shards(**{**arguments_of(tmp_path), **change})


def test_a_full_disk_is_an_error(tmp_path: Path):
    (tmp_path / "shards").mkdir()
    write_parquet(tmp_path / "shards", [3000] * 3)
    train, _ = load_parquet_shards(**arguments_of(tmp_path))
    full = "cache_dir='.*': the disk is full; make room there, choose another folder"
    with limited_files(20_000), pytest.raises(OSError, match=full):
        next(iter(train))
    wait_until(lambda: not [*(tmp_path / "cache").glob("*.partial*")])  # the threads that prefetch have ended too


def test_a_shard_that_changes_during_a_run_is_refused(shards: Callable[..., Any], tmp_path: Path):
    train, _ = shards(shuffle_shards=1)
    batches = iter(train)
    next(batches)
    for file in (tmp_path / "shards").iterdir():
        file.write_bytes(file.read_bytes())  # with a new modification time
    with pytest.raises(ValueError, match="has changed since this run began"):
        for loader in (batches, train, train):
            list(loader)


def test_tokens_of_another_type_are_refused(tmp_path: Path):
    (tmp_path / "shards").mkdir()
    write_tokens(tmp_path / "shards")
    numpy.zeros(90, numpy.int32).tofile(tmp_path / "shards" / "0000.int32")
    with pytest.raises(ValueError, match="0000.int32': has int32 in column 'tokens', where '.*000.uint16' has uint16"):
        load_token_shards(**arguments_of(tmp_path), context=4)
