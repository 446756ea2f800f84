"""Measure how fast sharded data is read, compared with torch's DataLoader, and how soon a resume gets a batch.

    python benchmarks/shards.py

Reading: the same parquet and tar files on this disk, with two worker processes. Torch's DataLoader reads them in the
usual way for data that does not fit in memory: through an iterable data set, whose workers divide the files and draw
samples from a buffer as large as the shards that we mix. The output shows samples per second of an epoch with an empty
cache and of a later epoch, and their ratios to torch's. All figures are medians of rounds that take turns.

Resuming: 20 million windows of tokens in 200 shards, in batches of 16. The output shows the time from building the
loaders to the first batch, resumed at batch 10, 10^3, 10^5 and 10^6, and its ratio to the time at batch 10.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runner.data.shards.parquet_shards import load_parquet_shards
from runner.data.shards.tar_shards import load_tar_shards
from runner.data.shards.token_shards import load_token_shards

SHARDS, ROWS, WIDTH, MIXED, BATCH, WORKERS = 17, 4000, 32, 4, 256, 2
TOKENS, TOKEN_BATCH, BATCHES = (200, 100_000), 16, (10, 1_000, 100_000, 1_000_000)
READ_LIMIT = 1.0
RESUME_LIMIT = 1.5


def write(folder: Path, shards: int, rows: int) -> None:
    """Write the same samples as parquet and as tar files."""
    import pyarrow
    import pyarrow.parquet

    generator = numpy.random.default_rng(0)
    for shard in range(shards):
        inputs = generator.standard_normal((rows, WIDTH), numpy.float32)
        targets = generator.integers(0, 10, rows)
        table = pyarrow.table({"inputs": list(inputs), "targets": targets})
        pyarrow.parquet.write_table(table, folder / f"{shard:03}.parquet", row_group_size=1000)
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for row in range(rows):
                array = io.BytesIO()
                numpy.save(array, inputs[row])
                for field, content in (("npy", array.getvalue()), ("cls", str(targets[row]).encode())):
                    member = tarfile.TarInfo(f"{shard:03}-{row:06}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def rows_of_parquet(file: Path) -> Iterator[tuple[Any, int]]:
    """Yield the samples of a parquet file."""
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
        yield from ((torch.tensor(row["inputs"]), row["targets"]) for row in batch.to_pylist())


def rows_of_tar(file: Path) -> Iterator[tuple[Any, int]]:
    """Yield the samples of a tar file, each stored in two files."""
    with tarfile.open(file, "r|") as tar:
        contents = (tar.extractfile(member).read() for member in tar)  # type: ignore[union-attr]
        for array, target in zip(contents, contents, strict=True):
            yield torch.from_numpy(numpy.load(io.BytesIO(array))), int(target)


class Streamed(IterableDataset[Any]):
    """Samples of files that the workers divide, shuffled through a buffer."""

    def __init__(self, files: list[Path], rows: Callable[[Path], Iterator[Any]], buffered: int) -> None:
        self.files, self.rows, self.buffered = files, rows, buffered

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        files = self.files[worker.id :: worker.num_workers] if worker else self.files
        generator = numpy.random.default_rng(0)
        buffer: list[Any] = []
        for sample in (sample for file in files for sample in self.rows(file)):
            if len(buffer) < self.buffered:
                buffer.append(sample)
                continue
            index = generator.integers(self.buffered)
            yield buffer[index]
            buffer[index] = sample
        yield from buffer


def speed(loader: Any) -> float:
    """Return the samples per second of an epoch, including the start of its workers."""
    start_time = time.perf_counter()
    samples = sum(len(batch[0]) for batch in loader)
    return samples / (time.perf_counter() - start_time)


def measure_reading(folder: Path, rounds: int, rows: int) -> bool:
    """Print how fast each loader reads; return whether ours are within the limit."""
    is_within = True
    options: dict[str, Any] = {"shuffle_shards": MIXED, "batch_size": BATCH, "num_workers": WORKERS}
    for suffix, load, stream in (
        ("parquet", load_parquet_shards, rows_of_parquet),
        ("tar", partial(load_tar_shards, inputs="npy"), rows_of_tar),
    ):
        speeds: dict[str, list[float]] = {"torch's DataLoader": [], "ours, first epoch": [], "ours, later": []}
        files = sorted(folder.glob(f"*.{suffix}"))
        for _ in range(rounds):
            streamed = Streamed(files[:-1], stream, MIXED * rows // WORKERS)
            speeds["torch's DataLoader"].append(speed(DataLoader(streamed, BATCH, num_workers=WORKERS)))
            shutil.rmtree(folder / "cache", ignore_errors=True)
            train = load(path=str(folder / f"*.{suffix}"), cache_dir=str(folder / "cache"), **options)[0]
            speeds["ours, first epoch"].append(speed(train))
            speeds["ours, later"].append(speed(train))
        base = statistics.median(speeds["torch's DataLoader"])
        print(f"{suffix}: samples per second, {WORKERS} workers")
        for name, values in speeds.items():
            ratio = statistics.median(values) / base
            is_within = is_within and ratio >= READ_LIMIT
            limit = "" if name.startswith("torch") else f" times  (limit {READ_LIMIT})"
            print(f"{name:>20}: {statistics.median(values):8,.0f}   {ratio:.2f}{limit}")
    return is_within


def measure_resume(folder: Path, rounds: int, shards: int, rows: int, batches: tuple[int, ...]) -> bool:
    """Print the times to the first batch; return whether all are within the limit."""
    for shard in range(shards):
        (numpy.arange(rows + 1) % 251).astype(numpy.uint8).tofile(folder / f"{shard:03}.uint8")
    options: dict[str, Any] = {"path": str(folder), "cache_dir": str(folder / "cache"), "context": 1}
    options |= {"shuffle_shards": MIXED, "batch_size": TOKEN_BATCH}
    load_token_shards(**options)  # writes the metadata of each shard now, so that this is not measured
    is_within = True
    for workers in (0, WORKERS):
        times: dict[int, list[float]] = {batch: [] for batch in batches}
        for _ in range(rounds):
            for batch in batches:
                start_time = time.perf_counter()
                train = load_token_shards(num_workers=workers, **options)[0]
                train.seek(3, batch)
                next(iter(train))
                times[batch].append(time.perf_counter() - start_time)
        print(f"first batch after a resume, {workers} workers")
        base = statistics.median(times[batches[0]])
        for batch, values in times.items():
            ratio = statistics.median(values) / base
            is_within = is_within and ratio <= RESUME_LIMIT
            print(f"at batch {batch:>9,}: {statistics.median(values) * 1000:7.1f} ms   {ratio:.2f} times")
    print(f"limit: {RESUME_LIMIT} times")
    return is_within


def main() -> int:
    """Run both measurements; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few samples, only to test this file")
    options = parser.parse_args()
    shards, rows = (MIXED + 1, 200) if options.quick else (SHARDS, ROWS)
    tokens, batches = ((MIXED + 1, 2000), (10, 100)) if options.quick else (TOKENS, BATCHES)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        for name in ("tables", "tokens"):
            (folder / name).mkdir()
        write(folder / "tables", shards, rows)
        is_within = measure_reading(folder / "tables", options.rounds, rows)
        is_within = measure_resume(folder / "tokens", options.rounds, *tokens, batches) and is_within
    return 0 if is_within or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
