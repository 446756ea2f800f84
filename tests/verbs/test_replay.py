"""A batch of a run is trained again: equal bit for bit, from wherever the run has a checkpoint, and the run stays."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import runner
from runner.checkpoints.digest import read_digests
from runner.checkpoints.history import checkpoint_before
from runner.records.record import Record

QUIET = ("callbacks=[checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba")
SMALL = ("model=mlp", "data.batch_size=200", "trainer.max_duration=3ep", "callbacks.checkpoint_saver.keep=-1")  # 18
SAVES = "callbacks.checkpoint_saver.save_interval=4ba"
RUN = "hydra.run.dir=run"

OWN = '''
"""Code of a user."""
from torch import nn

from runner import ClassificationModel


class Reads(ClassificationModel):
    """A model whose loss reads a value, which `vmap` cannot do."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)), 10)

    def loss(self, outputs, batch):
        found = super().loss(outputs, batch)
        assert float(found.detach()) > 0
        return found
'''


FAILS = """
from runner import Callback


class Fails(Callback):
    def batch_start(self, state, logger):
        if state.timestamp.batch == 2:
            raise RuntimeError("on purpose")
"""


def tree(run: Path) -> dict[str, int]:
    """Everything in a folder, with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}


def indices(batch: int) -> list[int]:
    """The samples of a batch, from 1, of epochs of 6 batches."""
    generator = torch.Generator().manual_seed(runner.stream_seed(0, "order", (batch - 1) // 6))
    place = (batch - 1) % 6 * 200
    return torch.randperm(1200, generator=generator)[place : place + 200].tolist()


def replayed(run_here: Any, run: str, batch: int, *more: str) -> dict[str, Any]:
    """The JSON result of replaying a batch."""
    found = json.loads(run_here("replay", run, str(batch), "--json", *more, code=0).out)
    return found["result"]


def test_each_batch_is_equal_to_the_bit_and_the_run_stays_as_it_is(tmp_path: Path, run_here: Any):
    algorithms = "+algorithms=[mixup,ema,gradient_clipping,stochastic_depth]"
    run_here(*SMALL, *QUIET, SAVES, RUN, algorithms.replace(",stochastic_depth", ""), code=0)
    before = tree(tmp_path / "run")
    for batch in (1, 4, 5, 7, 18):
        found = replayed(run_here, "run", batch, "--picture=")
        assert found["equal"] is True
        assert found["from_batch"] == (batch - 1) // 4 * 4  # never more than one interval again
        order = torch.randperm(
            1200, generator=torch.Generator().manual_seed(runner.stream_seed(0, "order", (batch - 1) // 6))
        )
        place = (batch - 1) % 6 * 200
        assert [one["index"] for one in found["samples"]] == order[place : place + 200].tolist()
    assert tree(tmp_path / "run") == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


def test_what_a_batch_shows(tmp_path: Path, run_here: Any):
    run_here(
        *SMALL,
        *QUIET,
        SAVES,
        RUN,
        "+algorithms=[gradient_clipping]",
        "algorithms.gradient_clipping.clipping_threshold=0.1",
        code=0,
    )
    done = run_here("replay", "run", "6", "--to", "b.safetensors", "--worst=3", code=0)
    assert "ok digests" in done.out and "gradient_clipping at AFTER_TRAIN_BATCH: gradients norm" in done.out
    found = replayed(run_here, "run", 6, "--worst=3", "--picture=")
    kept = load_file(tmp_path / "b.safetensors")
    assert (tmp_path / "run" / "replay" / "ba6" / "worst.png").read_bytes().startswith(b"\x89PNG")
    losses = [one["loss"] for one in found["samples"]]
    assert kept["losses"].tolist() == pytest.approx(losses) and len(losses) == 200
    assert sum(losses) / 200 == pytest.approx(found["loss"], rel=1e-5)  # smoothed as the loss saw the targets
    assert [one["loss"] for one in found["worst"]] == sorted(losses)[:-4:-1]
    total = sum(one**2 for one in found["gradients"].values()) ** 0.5
    assert total == pytest.approx(0.1, rel=1e-3)  # as clipped
    for name, norm in found["gradients"].items():
        assert float(kept[f"gradients.{name}"].norm()) == pytest.approx(norm, rel=1e-5)
    assert kept["outputs"].shape == (200, 10) and kept["batch.0"].shape[0] == 200
    assert found["activations"]["module.layers.4"] == pytest.approx(float(kept["outputs"].norm()), rel=1e-5)
    acts = {(one["algorithm"], one["event"]) for one in found["algorithms"]}
    assert acts >= {("batch_augment", "AFTER_DATALOADER"), ("gradient_clipping", "AFTER_TRAIN_BATCH")}
    assert kept["batch.0"].shape[1:] == (1, 8, 8)


@pytest.mark.slow
def test_without_a_name_there_is_no_picture_and_that_of_a_crash_is_in_the_run(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(FAILS)
    own = ("callbacks=[checkpoint_saver,crash_bundle]", "+callbacks.own._target_=own.Fails", RUN)
    run_here(*SMALL, *own, code=1)
    assert replayed(run_here, "run", 2, "--picture=")["picture"] is None
    assert not (tmp_path / "run" / "replay").exists()
    run_here("replay", "run", "~callbacks.own", code=0)
    assert [one.name for one in tmp_path.rglob("*.png")] == ["worst.png"]
    assert (tmp_path / "run" / "replay" / "ba3" / "worst.png").is_file()


def test_the_samples_that_an_algorithm_leaves_out_are_not_named(tmp_path: Path, run_here: Any):
    keep = ("algorithms.selective_backprop.start=0", "algorithms.selective_backprop.interrupt=0")
    plain = "algorithms=[selective_backprop]"
    run_here(*SMALL, *QUIET, RUN, plain, *keep, code=0)
    found = replayed(run_here, "run", 2, "--picture=")
    kept = [one["index"] for one in found["samples"]]
    assert len(kept) == 100 and kept == [one for one in indices(2) if one in kept]
    assert found["equal"] is True


@pytest.mark.slow
def test_a_run_that_was_resumed_with_changes_is_replayed_as_each_session_trained_it(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *QUIET, SAVES, RUN, code=0)
    run_here("resume", "run/checkpoints/ep1-ba12", "optimizer.lr=0.5", "--allow-changes", "optimizer.lr", code=0)
    assert Record.of_batch(tmp_path / "run", 12) == Record(tmp_path / "run/sessions/1")
    assert Record.of_batch(tmp_path / "run", 13) == Record(tmp_path / "run")
    for batch, before in ((11, 8), (12, 8), (13, 12), (18, 16)):
        found = replayed(run_here, "run", batch, "--picture=")
        assert (found["equal"], found["from_batch"]) == (True, before)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *QUIET, SAVES, RUN, code=0)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "ep1-ba8" / "state.pt").write_bytes(b"torn")
    assert checkpoint_before(tmp_path / "run", 10) == folder / "ep0-ba4"
    shutil.rmtree(folder)
    assert checkpoint_before(tmp_path / "run", 10) is None
    assert replayed(run_here, "run", 3, "--picture=")["equal"] is True
    assert replayed(run_here, "run", 18, "--picture=")["equal"] is True  # after the last checkpoint
    assert "the last batch of this run is 18" in run_here("replay", "run", "19", code=2).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "19"), "BATCH=19: the last batch of this run is 18"),
        (("run",), "BATCH='': must be the number of a batch, counted from 1; only a run that failed"),
        (("run", "0"), "BATCH='0': must be the number of a batch"),
        (("run", "x"), "BATCH='x': must be the number of a batch"),
        (("none", "3"), "RUN='none': no such folder"),
        ((), "replay: takes RUN [BATCH], not nothing; write runner replay RUN [BATCH], such as runner replay RUN 1234"),
        (("run", "3", "4"), "replay: takes RUN [BATCH], not run 3 4"),
        (("run", "3", "--to=x.pt"), "--to='x.pt': must end in .safetensors"),
        (("run", "3", "--picture", "x.jpg"), "--picture='x.jpg': must end in .png"),
        (("run", "3", "--worst=-1"), "--worst=-1: must be a number of samples, at least 0"),
        (("run", "3", "worst=2"), "worst=2: no such key; write runner replay run 3 --worst 2"),
    ],
)
def test_what_cannot_be_replayed_is_one_message(
    run_here: Any, finished: Path, arguments: tuple[str, ...], message: str
):
    shutil.copytree(finished, "run")
    done = run_here("replay", *arguments, code=2)
    assert f"error: {message}" in done.err and "Traceback" not in done.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 18 batches that ended."""
    from python_process import run_python

    folder = tmp_path_factory.mktemp("finished")
    run_python(["-m", "runner", *SMALL, *QUIET, SAVES, RUN], cwd=folder, check=True)
    return folder / "run"


def test_a_trainer_stands_before_the_batch_and_goes_on_batch_by_batch(finished: Path):
    with runner.replay(finished, 11) as trainer:
        assert trainer.state.timestamp.batch == 10
        for batch in (11, 12, 13):  # an epoch ends after 12
            trainer.fit()
            assert trainer.state.timestamp.batch == batch
        assert runner.first_difference(trainer.state.run_dir, finished).batch is None
        assert read_digests(trainer.state.run_dir)[-1]["batch"] == 13
    with pytest.raises(ValueError, match="batch=19: the last batch of this run is 18"):
        runner.replay(finished, 19)
    with pytest.raises(ValueError, match="batch=0: must be"):
        runner.replay(finished, 0)


def test_the_debugger_stands_before_the_forward_pass(tmp_path: Path, finished: Path, run_here: Any, monkeypatch: Any):
    (tmp_path / "own_debugger.py").write_text(
        "import sys\n"
        "def stop():\n"
        "    state = sys._getframe(1).f_locals['state']\n"
        "    print('STANDS', state.timestamp.batch, hasattr(state, 'outputs'), tuple(state.microbatch[0].shape))\n"
    )
    monkeypatch.setenv("PYTHONBREAKPOINT", "own_debugger.stop")
    done = run_here("replay", str(finished), "5", "--debug", "--picture", "", code=0)
    assert "STANDS 4 False (200, 1, 8, 8)" in done.out


@pytest.mark.slow
def test_two_ranks_are_replayed_on_two_and_their_samples_on_one(tmp_path: Path, run_app: Any):
    run_app(*SMALL, *QUIET, SAVES, RUN, "launch.nproc_per_node=2", "+algorithms=[mixup,ema]")
    whole = run_app("replay", "run", "11", "--picture=").stdout
    assert "ok digests   equal bit for bit up to batch 11" in whole
    alone = run_app("replay", "run", "11", "--picture=", "launch.nproc_per_node=1").stdout
    assert "ok digests   samples, on 1 of the 2 ranks that the run had, equal bit for bit up to batch 11" in alone
    assert "after batch 8" in alone
    refused = run_app("replay", "run", "11", "--debug", exit_code=2).stderr
    assert "--debug: stops one process; add launch.nproc_per_node=1" in refused


def test_a_replay_that_differs_says_so(tmp_path: Path, run_here: Any, finished: Path):
    shutil.copytree(finished, tmp_path / "run")
    found = replayed(run_here, "run", 6, "optimizer.lr=0.3", "--picture=")
    assert found["equal"] is False
    (tmp_path / "run" / "digests.jsonl").unlink()
    assert replayed(run_here, "run", 6, "--picture=")["equal"] is None


def test_a_loss_that_reads_values_is_measured_sample_by_sample(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(OWN)
    model = ("model._target_=own.Reads", "~model.module", "~model.num_classes")
    run_here(*SMALL, *QUIET, SAVES, RUN, *model, code=0)
    found = replayed(run_here, "run", 6, "--picture=")
    assert found["equal"] is True
    losses = [one["loss"] for one in found["samples"]]
    assert sum(losses) / 200 == pytest.approx(found["loss"], rel=1e-5)


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
    ids=lambda one: "-".join(one)[:40],
)
def test_fifty_batches_with_what_changes_training(tmp_path: Path, run_here: Any, changes: tuple[str, ...]):
    saves = "callbacks.checkpoint_saver.save_interval=7ba"  # the newest three, up to batch 76
    run_here("model=mlp", "data.batch_size=64", "trainer.max_duration=4ep", *QUIET, saves, RUN, *changes, code=0)
    for batch in random.Random(0).sample(range(1, 77), 10):
        assert replayed(run_here, "run", batch, "--picture=")["equal"] is True
