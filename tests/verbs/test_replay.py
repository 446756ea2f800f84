"""`runner replay`: any batch is trained again from the checkpoint before it, bit for bit; the run is not changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_runs import tree
from python_process import run_python
from safetensors.torch import load_file

import runner
from runner.checkpoints.digest import read_digests
from runner.checkpoints.history import checkpoint_before
from runner.records.record import Record

QUIET = ("callbacks=[checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba")
# 18 batches
SMALL = ("model=mlp", "data.batch_size=200", "trainer.max_duration=3ep", "callbacks.checkpoint_saver.keep=-1")
EPOCH = "trainer.max_duration=1ep"  # 6 batches, for tests that replay one of them
SAVES = "callbacks.checkpoint_saver.save_interval=4ba"
RUN = "hydra.run.dir=run"

OWN = '''
"""Code of a user."""
from torch import nn

from runner import ClassificationModel


class Reads(ClassificationModel):
    """A model whose loss reads a value, which is not possible in `vmap`."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)), 10)

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        assert float(loss.detach()) > 0
        return loss
'''


FAILS = """
from runner import Callback


class Fails(Callback):
    def batch_start(self, state, logger):
        if state.timestamp.batch == 2:
            raise RuntimeError("on purpose")
"""


def indices(batch: int) -> list[int]:
    """Return the samples of a batch, which is counted from 1 and is one of 6 in its epoch."""
    epoch, position = divmod(batch - 1, 6)
    generator = torch.Generator().manual_seed(runner.stream_seed(0, "order", epoch))
    return torch.randperm(1200, generator=generator)[200 * position : 200 * (position + 1)].tolist()


def replay(run_here: Any, run: str, batch: int, *arguments: str) -> dict[str, Any]:
    """Replay a batch, and return the JSON result."""
    return json.loads(run_here("replay", run, str(batch), "--json", *arguments, code=0).out)["result"]


def test_replayed_batches_are_bit_identical_and_the_run_is_unchanged(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *QUIET, SAVES, RUN, "+algorithms=[mixup,ema,gradient_clipping]", code=0)
    before = tree(tmp_path / "run")
    for batch in (1, 4, 5, 7, 18):
        result = replay(run_here, "run", batch, "--picture=")
        assert result["equal"] is True
        assert result["from_batch"] == (batch - 1) // 4 * 4  # the checkpoint before it; one is saved every 4 batches
        assert [sample["index"] for sample in result["samples"]] == indices(batch)
    assert tree(tmp_path / "run") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_replay_reports_losses_gradients_activations_and_algorithms(tmp_path: Path, run_here: Any):
    clipping = ("+algorithms=[gradient_clipping]", "algorithms.gradient_clipping.clipping_threshold=0.1")
    run_here(*SMALL, *QUIET, SAVES, RUN, *clipping, EPOCH, code=0)
    output = run_here("replay", "run", "6", "--to", "b.safetensors", "--worst=3", code=0).out
    assert "ok digests" in output and "gradient_clipping at AFTER_TRAIN_BATCH: gradients norm" in output
    result = replay(run_here, "run", 6, "--worst=3", "--picture=")
    tensors = load_file(tmp_path / "b.safetensors")
    assert (tmp_path / "run" / "replay" / "ba6" / "worst.png").read_bytes().startswith(b"\x89PNG")
    losses = [sample["loss"] for sample in result["samples"]]
    assert tensors["losses"].tolist() == pytest.approx(losses) and len(losses) == 200
    assert sum(losses) / 200 == pytest.approx(result["loss"], rel=1e-5)  # both with label smoothing
    assert [sample["loss"] for sample in result["worst"]] == sorted(losses)[:-4:-1]
    total = sum(norm**2 for norm in result["gradients"].values()) ** 0.5
    assert total == pytest.approx(0.1, rel=1e-3)  # after clipping
    for name, norm in result["gradients"].items():
        assert float(tensors[f"gradients.{name}"].norm()) == pytest.approx(norm, rel=1e-5)
    assert tensors["outputs"].shape == (200, 10) and tensors["batch.0"].shape == (200, 1, 8, 8)
    assert result["activations"]["module.layers.4"] == pytest.approx(float(tensors["outputs"].norm()), rel=1e-5)
    changes = {(change["algorithm"], change["event"]) for change in result["algorithms"]}
    assert changes >= {("batch_augment", "AFTER_DATALOADER"), ("gradient_clipping", "AFTER_TRAIN_BATCH")}


@pytest.mark.slow
def test_an_empty_name_makes_no_picture_and_the_default_is_in_the_run(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(FAILS)
    own = ("callbacks=[checkpoint_saver,crash_bundle]", "+callbacks.own._target_=own.Fails", RUN)
    run_here(*SMALL, *own, code=1)
    assert replay(run_here, "run", 2, "--picture=")["picture"] is None
    assert not (tmp_path / "run" / "replay").exists()
    run_here("replay", "run", "~callbacks.own", code=0)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["worst.png"]
    assert (tmp_path / "run" / "replay" / "ba3" / "worst.png").is_file()


def test_a_read_only_run_is_replayed_and_a_file_that_cannot_be_written_is_one_message(
    finished: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    for option in ("--picture=file/a.png", "--to=file/a.safetensors"):
        refused = run_here("replay", str(finished), "2", option, code=2)
        assert refused.err == "error: cannot use 'file': File exists\n"
    access = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != finished and access(path, mode))
    before = tree(finished)
    picture = replay(run_here, str(finished), 2)["picture"]
    assert picture == "replay/ba2/worst.png" and (tmp_path / picture).is_file()
    assert tree(finished) == before


def test_only_samples_that_selective_backprop_keeps_are_listed(tmp_path: Path, run_here: Any):
    keep = ("algorithms.selective_backprop.start=0", "algorithms.selective_backprop.interrupt=0")
    run_here(*SMALL, *QUIET, RUN, "algorithms=[selective_backprop]", *keep, EPOCH, code=0)
    result = replay(run_here, "run", 2, "--picture=")
    kept = [sample["index"] for sample in result["samples"]]
    assert len(kept) == 100 and kept == [index for index in indices(2) if index in kept]
    assert result["equal"] is True


@pytest.mark.slow
def test_each_batch_is_replayed_with_the_config_of_its_session(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *QUIET, SAVES, RUN, code=0)
    run_here("resume", "run/checkpoints/ep1-ba12", "optimizer.lr=0.5", "--allow-changes", "optimizer.lr", code=0)
    assert Record.of_batch(tmp_path / "run", 12) == Record(tmp_path / "run/sessions/1")
    assert Record.of_batch(tmp_path / "run", 13) == Record(tmp_path / "run")
    for batch, before in ((11, 8), (12, 8), (13, 12), (18, 16)):
        result = replay(run_here, "run", batch, "--picture=")
        assert (result["equal"], result["from_batch"]) == (True, before)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *QUIET, SAVES, RUN, code=0)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "ep1-ba8" / "state.pt").write_bytes(b"damaged")
    assert checkpoint_before(tmp_path / "run", 10) == folder / "ep0-ba4"
    shutil.rmtree(folder)
    assert checkpoint_before(tmp_path / "run", 10) is None
    assert replay(run_here, "run", 3, "--picture=")["equal"] is True
    assert replay(run_here, "run", 18, "--picture=")["equal"] is True  # after the last checkpoint
    assert "the last batch of this run is 18" in run_here("replay", "run", "19", code=2).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "19"), "BATCH=19: the last batch of this run is 18"),
        (("run",), "BATCH='': must be the number of a batch, counted from 1; only a run that failed"),
        (("run", "0"), "BATCH='0': must be the number of a batch"),
        (("run", "x"), "BATCH='x': must be the number of a batch"),
        (("none", "3"), "RUN='none': no such folder"),
        ((), "replay: needs RUN [BATCH]; write runner replay RUN [BATCH], such as runner replay RUN 1234"),
        (("run", "3", "4"), "replay: takes RUN [BATCH], not run 3 4"),
        (("run", "3", "--to=x.pt"), "--to='x.pt': must end in .safetensors"),
        (("run", "3", "--picture", "x.jpg"), "--picture='x.jpg': must end in .png"),
        (("run", "3", "--worst=-1"), "--worst=-1: must be a number of samples, at least 0"),
        (("run", "3", "worst=2"), "worst=2: no such key; write runner replay run 3 --worst 2"),
    ],
)
def test_what_cannot_be_replayed_is_refused(run_here: Any, finished: Path, arguments: tuple[str, ...], message: str):
    shutil.copytree(finished, "run")
    error = run_here("replay", *arguments, code=2).err
    assert f"error: {message}" in error and "Traceback" not in error


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 18 batches."""

    folder = tmp_path_factory.mktemp("finished")
    run_python(["-m", "runner", *SMALL, *QUIET, SAVES, RUN], cwd=folder, check=True)
    return folder / "run"


def test_runner_replay_returns_a_trainer_that_trains_batch_by_batch(finished: Path):
    with runner.replay(finished, 11) as trainer:
        assert trainer.state.timestamp.batch == 10
        for batch in (11, 12, 13):  # batch 12 is the last of an epoch
            trainer.fit()
            assert trainer.state.timestamp.batch == batch
        assert runner.first_difference(trainer.state.run_dir, finished).batch is None
        assert read_digests(trainer.state.run_dir)[-1]["batch"] == 13
    with pytest.raises(ValueError, match="batch=19: the last batch of this run is 18"):
        runner.replay(finished, 19)
    with pytest.raises(ValueError, match="batch=0: must be"):
        runner.replay(finished, 0)


def test_the_debugger_stops_before_the_forward_pass(tmp_path: Path, finished: Path, run_here: Any, monkeypatch: Any):
    (tmp_path / "own_debugger.py").write_text(
        "import sys\n"
        "def stop():\n"
        "    state = sys._getframe(1).f_locals['state']\n"
        "    print('STOPPED', state.timestamp.batch, hasattr(state, 'outputs'), tuple(state.microbatch[0].shape))\n"
    )
    monkeypatch.setenv("PYTHONBREAKPOINT", "own_debugger.stop")
    output = run_here("replay", str(finished), "5", "--debug", "--picture", "", code=0).out
    assert "STOPPED 4 False (200, 1, 8, 8)" in output


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed_on_two_ranks_or_one(tmp_path: Path, run_app: Any):
    run_app(*SMALL, *QUIET, SAVES, RUN, "launch.nproc_per_node=2", "+algorithms=[mixup,ema]")
    two_ranks = run_app("replay", "run", "11", "--picture=").stdout
    assert "ok digests   equal bit for bit up to batch 11" in two_ranks
    one_rank = run_app("replay", "run", "11", "--picture=", "launch.nproc_per_node=1").stdout
    assert "ok digests   samples, on 1 of the 2 ranks that the run had, equal bit for bit up to batch 11" in one_rank
    assert "after batch 8" in one_rank
    error = run_app("replay", "run", "11", "--debug", exit_code=2).stderr
    assert "--debug: stops one process; add launch.nproc_per_node=1" in error


def test_a_replay_with_another_learning_rate_is_reported_as_different(tmp_path: Path, run_here: Any, finished: Path):
    shutil.copytree(finished, tmp_path / "run")
    result = replay(run_here, "run", 6, "optimizer.lr=0.3", "--picture=")
    assert result["equal"] is False
    (tmp_path / "run" / "digests.jsonl").unlink()
    assert replay(run_here, "run", 6, "--picture=")["equal"] is None


def test_a_loss_that_vmap_cannot_run_is_measured_sample_by_sample(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(OWN)
    model = ("model._target_=own.Reads", "~model.module", "~model.num_classes")
    run_here(*SMALL, *QUIET, SAVES, RUN, *model, EPOCH, code=0)
    result = replay(run_here, "run", 6, "--picture=")
    assert result["equal"] is True
    losses = [sample["loss"] for sample in result["samples"]]
    assert sum(losses) / 200 == pytest.approx(result["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("model=resnet8", "+algorithms=[mixup,swa]", "algorithms.swa.update_interval=2ba"),
        ("model=resnet8", "+algorithms=[ema,cutmix,sam]", "scheduler=warmup_stable_decay"),
        ("algorithms=[info_batch]",),
        ("+algorithms=[schedule_free]", "optimizer=schedule_free", "scheduler=none"),
        ("+algorithms=[reduce_on_plateau]", "scheduler=none", "trainer.grad_accum=3"),
        ("scheduler=exponential", "optimizer=adamw", "trainer.precision=amp_bf16"),
    ],
    ids=lambda changes: "-".join(changes)[:40],
)
def test_random_batches_are_replayed_with_algorithms_and_schedulers(
    tmp_path: Path, run_here: Any, changes: tuple[str, ...]
):
    saves = "callbacks.checkpoint_saver.save_interval=7ba"  # only the newest three checkpoints are kept
    run_here("model=mlp", "data.batch_size=64", "trainer.max_duration=4ep", *QUIET, saves, RUN, *changes, code=0)
    for batch in random.Random(0).sample(range(1, 77), 4):
        assert replay(run_here, "run", batch, "--picture=")["equal"] is True
