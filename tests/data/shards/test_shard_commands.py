"""Commands on data in shards: a run, its resume, two ranks, kills, and `check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from main_runs import run_folders
from shard_files import write_parquet, write_tars, write_tokens
from shard_server import serving
from tiers import fast

MLP = ("model=mlp", "model.module.in_features=4", "model.num_classes=3")
GPT = ("model=gpt", "model.module.context=4")
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "parquet": (write_parquet, ("data=parquet_shards", "data.path=shards", *MLP)),
    "tar": (write_tars, ("data=tar_shards", "data.path=shards", "data.inputs=npy", *MLP)),
    "tokens": (write_tokens, ("data=token_shards", "data.path=shards", "data.context=4", *GPT)),
}
SMALL = (
    *("data.batch_size=5", "data.eval_batch_size=4", "data.shuffle_shards=2", "data.cache_dir=cache"),
    *("data.cache_gb=0.1", "algorithms=none", "scheduler=constant", "callbacks=[checkpoint_saver]"),
    *("data.num_workers=1", "trainer.device=cpu", "trainer.eval_interval=1ep"),
)


@pytest.fixture(params=fast(KINDS, "tokens"))
def command(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """Write shards of a format, and return the arguments of a run on them."""
    write, arguments = KINDS[request.param]
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards")
    return (*arguments, *SMALL)


def weights(folder: Path, number: int) -> dict[str, torch.Tensor]:
    run = run_folders(folder)[number]
    return torch.load(run / "checkpoints" / "latest" / "model.pt", weights_only=True)


def test_a_run_resumed_within_an_epoch_is_bit_identical(command: tuple[str, ...], tmp_path: Path, run_here: Any):
    run_here(*command, "trainer.max_duration=12ba", code=0)
    run_here(*command, "trainer.max_duration=3ba", "data.num_workers=0", code=0)
    changes = ("trainer.max_duration=12ba", "data.num_workers=1", "--allow-changes=data.num_workers")
    run_here("resume", str(run_folders(tmp_path)[1]), *changes, code=0)
    torch.testing.assert_close(weights(tmp_path, 1), weights(tmp_path, 0), atol=0, rtol=0)


def test_a_check_reads_shards_without_training(command: tuple[str, ...], run_here: Any):
    assert "ok batch" in run_here("check", *command, code=0).out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["parquet", "tar", "tokens"], indirect=True)
def test_two_ranks_train_like_one_rank(command: tuple[str, ...], tmp_path: Path, run_app: Any, run_here: Any):
    command = (*command, "trainer.max_duration=8ba")
    run_app(*command, "launch.nproc_per_node=2")
    run_here(*command, code=0)
    torch.testing.assert_close(weights(tmp_path, 0), weights(tmp_path, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["parquet"], indirect=True)
def test_killed_attempts_change_no_result(command: tuple[str, ...], run_here: Any):
    # All attempts share a cache, and may be killed while they write to it.
    options = ("--batches=12", "--kills=3", "--save-interval=2ba", "--patience=200")
    assert "equal" in run_here("prove", *command, "data.num_workers=2", *options, code=0).out


def test_changed_shards_are_refused_within_an_epoch(tmp_path: Path, run_here: Any):
    (tmp_path / "shards").mkdir()
    write_parquet(tmp_path / "shards")
    run_here(*KINDS["parquet"][1], *SMALL, "data.num_workers=0", "trainer.max_duration=3ba", code=0)
    write_parquet(tmp_path / "shards", [12, 7, 9, 10, 11])
    result = run_here("resume", "latest", "trainer.max_duration=6ba", code=2)
    assert "the order of batches has changed: blocks 4 of sizes" in result.err


def test_a_run_reads_from_an_address(tmp_path: Path, run_here: Callable[..., Any]):
    pytest.importorskip("aiohttp")
    (tmp_path / "served").mkdir()
    write_parquet(tmp_path / "served")
    with serving(tmp_path / "served") as server:
        address = f"data.path='{server.url}/{{000..004}}.parquet'"
        command = [argument for argument in KINDS["parquet"][1] if argument != "data.path=shards"]
        run_here(*command, *SMALL, address, "trainer.max_duration=2ep", code=0)
        (server.folder / "001.parquet").unlink()
        result = run_here(*command, *SMALL, address, code=2)
        assert f"{server.url}/001.parquet': there is no such file" in result.err
