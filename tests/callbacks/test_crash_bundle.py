"""A failed run leaves a bundle that reproduces the failure elsewhere: the same type of error, line and batch."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from runner.callbacks import CrashBundle
from runner.records.run_files import unpacked

SMALL = ("model=mlp", "data.batch_size=200", "trainer.max_duration=3ep", "~callbacks.mlflow_logger")  # 18 batches
CONSTRUCTED = ("init", "before_load", "after_load")  # events before the first batch
HOOKS = (
    *("iteration_start", "epoch_start", "before_dataloader", "after_dataloader", "batch_start", "before_train_batch"),
    *("before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"),
    *("after_train_batch", "batch_end", "batch_checkpoint", "epoch_end", "epoch_checkpoint", "iteration_end"),
    *("iteration_checkpoint", "fit_end", "eval_before_all", "eval_start", "eval_batch_start", "eval_before_forward"),
    *("eval_after_forward", "eval_batch_end", "eval_end", "eval_after_all", *CONSTRUCTED),
)
FUNCTIONS = (
    *("forward", "loss", "metric", "forward_hook", "backward_hook", "algorithm", "optimizer", "schedule"),
    *("transform", "getitem", "collate", "state_dict"),
)
QUICK = ("after_forward", "epoch_checkpoint", "init", "getitem")
OWN = '''
"""A user's code, which fails at PLACE."""
from functools import partial

import torch
from torch import nn

from runner import Algorithm, Callback, ClassificationModel
from runner.data import DatasetLoader
from runner.data.images.digits import load_digits

TRAINED = 0  # batches
CONSTRUCTED = ("init", "before_load", "after_load")


def fail(place, state=None):
    trained = TRAINED if state is None else state.timestamp.batch
    if place == PLACE and (trained >= 7 or place in CONSTRUCTED):
        raise RuntimeError(f"on purpose, in {place}")


class Watcher(Callback):
    def batch_start(self, state, logger):
        global TRAINED
        TRAINED = state.timestamp.batch
        fail("batch_start", state)

    def state_dict(self):
        fail("state_dict")
        return {}


def _make(event):
    def hook(self, state, logger):
        fail(event, state)
    return hook


for _event in EVENTS:
    setattr(Watcher, _event, _make(_event))


class Changer(Algorithm):
    def before_forward(self, state, logger):
        fail("algorithm", state)


class Model(ClassificationModel):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)
        self.module[1].register_forward_hook(lambda *_: fail("forward_hook"))
        if PLACE == "backward_hook":
            self.module[1].register_full_backward_pre_hook(lambda *_: fail("backward_hook"))

    def forward(self, batch):
        fail("forward")
        return super().forward(batch)

    def loss(self, outputs, batch):
        fail("loss")
        return super().loss(outputs, batch)

    def update_metric(self, batch, outputs, metric):
        fail("metric")
        super().update_metric(batch, outputs, metric)


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        fail("optimizer")
        return super().step(closure)


def schedule(timestamp):
    fail("schedule")
    return 1.0


class Images:
    """Samples that a worker reads. It does not know the batch, so reading one of the samples fails."""

    def __init__(self, images, labels, failing):
        self.tensors, self.failing = (images, labels), failing

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        if PLACE == "getitem" and index == self.failing:
            raise RuntimeError("on purpose, in getitem")
        return self.tensors[0][index], self.tensors[1][index], index


def collate(failing, samples):
    if PLACE == "collate" and failing in [index for _, _, index in samples]:
        raise RuntimeError("on purpose, in collate")
    return torch.utils.data.default_collate([sample[:2] for sample in samples])


def load_data(batch_size, eval_batch_size, seed):
    train, evaluation, *_ = load_digits(batch_size, eval_batch_size, seed=seed)
    failing = train.order.permutation(0)[600]  # the first sample of the fourth batch
    if PLACE in ("getitem", "collate"):
        images, collate_fn = Images(*train.tensors, int(failing)), partial(collate, int(failing))
        return DatasetLoader(images, batch_size, True, seed=seed, num_workers=1, collate_fn=collate_fn), evaluation

    def transform(batch):
        if PLACE == "transform" and (batch[0][0] == train.tensors[0][failing]).all():
            raise RuntimeError("on purpose, in transform")
        return batch

    train.transform = transform
    return train, evaluation
'''
PARTS = (
    *("model._target_=own.Model", "~model.module", "~model.num_classes", "data._target_=own.load_data"),
    *("~data.test_samples", "+callbacks.own._target_=own.Watcher", "+algorithms.own._target_=own.Changer"),
    *("scheduler=none", "+scheduler._target_=own.schedule", "+scheduler._partial_=true", "hydra.run.dir=run"),
    "optimizer._target_=own.Optimizer",
)


def fail_and_replay(place: str, folder: Path, run_app: Any, *arguments: str) -> dict[str, Any]:
    """Assert that the bundle of a run that fails at `place` fails again in another folder; return its crash.json."""
    events = [hook for hook in HOOKS if hook != "batch_start"]
    (folder / "own.py").write_text(f"PLACE = {place!r}\nEVENTS = {events!r}\n{OWN}")
    first = run_app(*SMALL, *PARTS, *arguments, exit_code=1)
    # The last line of an error before the first batch names the object that could not be made.
    advice = first.stderr.splitlines()[-2 if place in CONSTRUCTED else -1]
    assert "python -m runner replay " in advice and advice.endswith("run/crash.zip"), first.stderr
    other = folder / "other"
    other.mkdir()
    shutil.move(folder / "run" / "crash.zip", other)
    shutil.rmtree(folder / "run")
    (folder / "own.py").unlink()
    again = run_app("replay", "crash.zip", folder=other, exit_code=1)
    assert f"on purpose, in {place}" in again.stderr, again.stderr
    crash = json.loads(zipfile.ZipFile(other / "crash.zip").read("crash.json"))
    message = f"\nthe failure of the run: RuntimeError at {crash['at']}, in batch {crash['batch']}"
    assert message in again.stderr, again.stderr
    assert crash["type"] == "RuntimeError"
    assert os.listdir(other) == ["crash.zip"]
    return crash


@pytest.mark.parametrize("place", QUICK)
def test_a_bundle_reproduces_the_failure_in_another_folder(place: str, tmp_path: Path, run_app: Any):
    batches = {"init": 1, "getitem": 4, "epoch_checkpoint": 13}
    assert fail_and_replay(place, tmp_path, run_app)["batch"] == batches.get(place, 8)


@pytest.mark.slow
@pytest.mark.parametrize("place", [hook for hook in (*HOOKS, *FUNCTIONS) if hook not in QUICK])
def test_a_bundle_reproduces_a_failure_in_any_hook_or_function(place: str, tmp_path: Path, run_app: Any):
    fail_and_replay(place, tmp_path, run_app, "trainer.iteration_length=2ep")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["batch_checkpoint", "epoch_checkpoint", "iteration_checkpoint", "state_dict"])
def test_a_bundle_reproduces_a_failure_right_after_a_checkpoint(place: str, tmp_path: Path, run_app: Any):
    each = ("callbacks.checkpoint_saver.save_interval=1ba", "trainer.iteration_length=2ep")
    fail_and_replay(place, tmp_path, run_app, *each)


@pytest.fixture
def crashed(tmp_path: Path, run_here: Any) -> Path:
    """The bundle of a run that failed in its eighth batch."""
    (tmp_path / "own.py").write_text(f"PLACE = 'after_forward'\nEVENTS = ['after_forward']\n{OWN}")
    run_here(*SMALL, *PARTS, code=1)
    return tmp_path / "run" / "crash.zip"


def test_a_strangers_bundle_needs_permission_for_its_classes_and_its_code(crashed: Path, tmp_path: Path, run_app: Any):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(crashed, other)
    stranger = {"XDG_CONFIG_HOME": str(tmp_path / "stranger")}
    (tmp_path / "own.py").unlink()
    refused = run_app("replay", "crash.zip", folder=other, env=stranger, exit_code=2).stderr
    assert "uses code that is not part of this project: own.Changer; own.Model" in refused
    allowed = "--allow-targets=own.*"
    unread = run_app("replay", "crash.zip", allowed, folder=other, env=stranger, exit_code=2).stderr
    assert "add --allow-code if you trust it" in unread and "there is no module 'own'" in unread
    again = run_app("replay", "crash.zip", allowed, "--allow-code", folder=other, env=stranger, exit_code=1).stderr
    assert "the failure of the run: RuntimeError" in again


def test_control_characters_in_a_bundle_are_escaped(crashed: Path, tmp_path: Path, run_here: Any):
    crash = {"type": "\x1b[31mE", "at": ["\x1b]0;t\x07"], "message": "\x1b[2J", "batch": 10**30}
    packages = {"": "1", "\x1b[2Jx": "2", "torch": ["\x1b[31m"]}
    environment = {"packages": packages, "git_commit": ["\x1b[31m"], "threads": 1e9}
    with zipfile.ZipFile(crashed) as file, zipfile.ZipFile(tmp_path / "changed.zip", "w") as other:
        changed = {"crash.json": json.dumps(crash), "environment.json": json.dumps(environment)}
        for name in file.namelist():
            other.writestr(name, changed.get(name, file.read(name)))
    error = run_here("replay", "changed.zip", code=1).err
    assert "not the failure of the run: \\x1b[31mE at " in error and "\x1b" not in error


def test_a_replay_without_the_bug_says_that_it_did_not_fail(crashed: Path, tmp_path: Path, run_here: Any):
    done = run_here("replay", "run", "~callbacks.own", code=0)  # a run's folder contains its bundle
    assert "warning crash  it did not fail this time; the recorded failure is RuntimeError at own.py" in done.out
    with zipfile.ZipFile(crashed) as file:
        names = {*file.namelist()}
    assert {"config.yaml", "crash.json", "code/own.py", "batch.safetensors", "signature"} <= names
    assert not [name for name in names if name.startswith("/") or ".." in name]


@pytest.mark.slow
def test_a_bundle_of_two_ranks_fails_again_on_two_ranks(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(
        f"PLACE = 'after_forward'\nEVENTS = []\n{OWN}\n"
        "class OnlyRank1(Callback):\n"
        "    def after_forward(self, state, logger):\n"
        "        from runner import get_global_rank\n"
        "        if get_global_rank() == 1:\n"
        "            fail('after_forward', state)\n"
    )
    arguments = [part.replace("own.Watcher", "own.OnlyRank1") for part in PARTS]
    first = run_app(*SMALL, *arguments, "launch.nproc_per_node=2", "scheduler=none", exit_code=1)
    assert "on purpose, in after_forward" in first.stderr and "replay" in first.stderr
    again = run_app("replay", "run/crash.zip", exit_code=1)
    assert "on purpose, in after_forward" in again.stderr


def test_a_bundle_leaves_out_files_that_exceed_max_size(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(f"PLACE = 'after_forward'\nEVENTS = ['after_forward']\n{OWN}")
    done = run_here(*SMALL, *PARTS, "callbacks.crash_bundle.max_size=0.02", code=1)
    assert "do not fit into max_size" in done.err
    bundle = tmp_path / "run" / "crash.zip"
    assert bundle.stat().st_size < 20_000, zipfile.ZipFile(bundle).infolist()
    again = run_here("replay", str(bundle), code=1)
    assert "after batch 0" in again.out and "the failure of the run: RuntimeError" in again.err


def test_resuming_a_finished_run_changes_no_file(tmp_path: Path, run_here: Any):
    run_here("model=mlp", "trainer.max_duration=1ba", "callbacks=[checkpoint_saver,crash_bundle]", "hydra.run.dir=run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "this run has finished" in run_here("resume", "run", code=2).err
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("max_size", [0, -1.0])
def test_a_wrong_size_is_refused(max_size: float):
    with pytest.raises(ValueError, match=f"max_size={max_size}: must be a number of megabytes above 0"):
        CrashBundle(max_size)


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("../evil")], "holds '../evil', which does not belong"),
        ([entry("/etc/evil")], "holds '/etc/evil'"),
        ([entry("code/../../evil.py")], "holds 'code/../../evil.py'"),
        ([entry("code/.hidden/evil.py")], "does not belong"),
        ([entry("code\\..\\evil.py")], "does not belong"),
        ([entry("checkpoints/x/evil.pkl")], "does not belong"),
        ([entry("runner/__init__.py")], "does not belong"),
        ([entry("git.patch", stat.S_IFLNK | 0o777)], "holds 'git.patch', which does not belong"),
        ([entry("git.patch", stat.S_IFIFO | 0o777)], "does not belong"),
        ([entry("overrides.yaml"), entry("overrides.yaml")], "does not belong"),
        ([], "contains no run; a run that fails leaves a crash.zip"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_bundle_writes_no_files(tmp_path: Path, entries: list[zipfile.ZipInfo], message: str):
    path = tmp_path / "crash.zip"
    with zipfile.ZipFile(path, "w") as file:
        for info in entries:
            file.writestr(info, "x")
        if entries:
            file.writestr("config.yaml", "{}")
        file.writestr("signature", "x")
    with pytest.raises(ValueError, match="does not belong|contains no run") as raised:
        unpacked(path)
    assert message in str(raised.value)
    assert os.listdir(tmp_path) == ["crash.zip"]


def test_a_zip_bomb_and_a_damaged_bundle_are_refused(tmp_path: Path):
    path = tmp_path / "crash.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("config.yaml", "{}")
        file.writestr("code/bomb.py", b"\0" * 50_000_000)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match="would unpack to more than"):
        unpacked(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("config.yaml", "a: 1\n" * 5_000)
    content = bytearray(path.read_bytes())
    content[60:70] = b"\xff" * 10
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a complete crash\.zip"):
        unpacked(path)
