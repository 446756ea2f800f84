"""Checkpoints are written atomically.

Ctrl-C, SIGTERM, and errors that leave the weights intact save a checkpoint of the current batch before exiting. If a
data worker or a rank is killed, the command starts again from there. Full disks and unreachable servers do not stop
training.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import main_runs
import pytest
import restarted
import torch
from outcomes import KILLED, assert_equal, assert_sound, count_trained, kill_after, read, trained
from restarted import SHORT, Left, left_in, prepare, restarts, strikes
from sessions import fit, fit_in_trouble, interrupt, save_each_batch
from stores import query
from tiers import fast

from runner.records.result import Result, read_result

LONGEST = 0.08  # seconds between the first batch of a session and the kill, at most
TWO = "launch.nproc_per_node=2"
HERE = "hydra.run.dir=run"


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_during_saves_lose_at_most_one_interval(sessions: Any, tmp_path: Path, kills: int):
    """Each session resumes the previous one, and is killed at a random time; it fails if temporary files are left."""
    # A checkpoint in the background is written while the next batch is trained.
    most_lost = {tmp_path / "run": 1, tmp_path / "asynchronous": 2}
    for run in (*most_lost, tmp_path / "whole"):
        run.mkdir()
        (run / "progress").touch()
    generator, kills_in_saves = random.Random(0), 0
    for _ in range(kills):
        kill_after(sessions, {run: generator.uniform(0, LONGEST) for run in most_lost})
        kills_in_saves += sum(assert_sound(run, lost) for run, lost in most_lost.items())
    assert kills_in_saves > kills / 2, "too few kills happened during a save"
    for run in most_lost:
        last = f"{trained(run) + 3}ba"
        sessions.run(save_each_batch, run_dir=run, max_duration=last)
        assert not [*(run / "checkpoints").glob(".*")]
        names = {path.name for path in (run / "checkpoints").iterdir()} - {"latest", "best"}
        assert len(names) <= 3  # the two newest and the best; those that killed sessions could not delete are gone
        sessions.run(save_each_batch, run_dir=tmp_path / "whole", max_duration=last, save=False)
        outcomes = [torch.load(folder / "outcome.pt", weights_only=True) for folder in (run, tmp_path / "whole")]
        torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped": ("model.pt", flip, "model.pt was modified: its SHA-256 differs from its manifest"),
    "missing": ("state.pt", Path.unlink, "state.pt is missing"),
}


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(sessions: Any, tmp_path: Path):
    sessions.run(fit, run_dir=tmp_path / "whole")
    kill = {"event": "batch_end", "batch": 18}
    sessions.run(fit, ends=KILLED, run_dir=tmp_path / "killed", save_interval="8ba", kill=kill)
    for name, (file, damage, _) in DAMAGES.items():
        shutil.copytree(tmp_path / "killed", tmp_path / name, symlinks=True)
        damage(tmp_path / name / "checkpoints" / "ep1-ba16" / file)
    sessions.run_each(fit, [{"run_dir": tmp_path / name} for name in DAMAGES])
    for name, session in zip(DAMAGES, sessions.started[2:], strict=True):
        log = session.log.read_text()
        assert log.count("ep1-ba16 is not used: ") == 1 and DAMAGES[name][2] in log, name
        assert_equal(tmp_path / name, read(tmp_path / "whole"))
        assert count_trained(tmp_path / name)[8] == 2 > count_trained(tmp_path / name)[7], name


PLACES = {"data": 6, "forward": 6, "evaluation": 8, "save": 7}
"""What a run is doing when a signal arrives, and the number of batches after which a single process ends."""


SIGNALS = [signal.SIGTERM, signal.SIGINT]


def batches(run: Path) -> int:
    """Return the batches in the newest checkpoint, after asserting that no rank has trained more."""
    saved = json.loads((run / "checkpoints" / "latest" / "manifest.json").read_text())["timestamp"]["batch"]
    for path in run.glob("ids*.jsonl"):
        assert json.loads(path.read_text().splitlines()[-1])[0] == saved - 1
    return saved


@pytest.mark.parametrize("number", fast(SIGNALS, signal.SIGTERM))
def test_a_signal_ends_a_single_process_after_the_current_batch(sessions: Any, tmp_path: Path, number: int):
    sessions.run(fit, run_dir=tmp_path / "whole")
    calls = [{"run_dir": tmp_path / place, "place": place, "number": number} for place in PLACES]
    sessions.run_each(interrupt, calls, ends=128 + number)
    assert {place: batches(tmp_path / place) for place in PLACES} == PLACES
    sessions.run_each(fit, [{"run_dir": tmp_path / place} for place in PLACES])
    for place in PLACES:
        assert_equal(tmp_path / place, read(tmp_path / "whole"))


SIGNALS_TO_RANKS = [
    ("data", signal.SIGTERM, None),
    ("data", signal.SIGINT, 1),
    ("forward", signal.SIGTERM, 1),
    ("evaluation", signal.SIGTERM, None),
    ("evaluation", signal.SIGINT, 0),
    ("save", signal.SIGTERM, 0),
]


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_ranks_after_the_same_batch(sessions: Any, tmp_path: Path):
    """Ranks tell each other about signals about once a second."""
    sessions.run(fit, ranks=2, run_dir=tmp_path / "whole")
    runs = [tmp_path / f"{place}-{number}-{rank}" for place, number, rank in SIGNALS_TO_RANKS]
    for number in SIGNALS:
        calls = [
            {"run_dir": run, "place": place, "number": number, "rank": rank}
            for run, (place, signal_number, rank) in zip(runs, SIGNALS_TO_RANKS, strict=True)
            if signal_number == number
        ]
        sessions.run_each(interrupt, calls, ranks=2, ends=128 + number, at_once=4)
    for run, (place, _, _) in zip(runs, SIGNALS_TO_RANKS, strict=True):
        assert PLACES[place] <= batches(run) <= PLACES[place] + 8
    sessions.run_each(fit, [{"run_dir": run} for run in runs], ranks=2)
    for run in runs:
        assert_equal(run, read(tmp_path / "whole"))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with the module of `restarted.py`."""
    prepare(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def wholes() -> dict[str, Left]:
    """A cache of the results of undisturbed commands, by their arguments."""
    return {}


@pytest.fixture
def whole(wholes: dict[str, Left], run_app: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a command without a failure, and returns its results."""

    def run(*arguments: str) -> Left:
        if str(arguments) not in wholes:
            folder = tmp_path_factory.mktemp("whole")
            prepare(folder)
            run_app(*SHORT, HERE, *strikes("nothing", times=0), *arguments, folder=folder)
            wholes[str(arguments)] = left_in(folder / "run")
        return wholes[str(arguments)]

    return run


@pytest.mark.parametrize(
    ("kind", "event", "batch", "expected"),
    [
        ("worker", "before_forward", 5, [r"restart 1 of 3, from batch ([6-9]|10), .*data worker .* by signal 9"]),
        pytest.param("worker", "epoch_end", 15, [], marks=pytest.mark.slow),
        pytest.param(
            "file", "before_forward", 6, [r"restart 1 of 3, from batch 6, .*No space"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_restarts_from_its_checkpoint_after_a_failure(
    here: Path, run_app: Any, whole: Any, kind: str, event: str, batch: int, expected: list[str]
):
    finished = run_app(*SHORT, HERE, *strikes(kind, event=event, batch=batch))
    messages = restarts(finished.stderr)
    assert len(messages) == len(expected) and all(map(re.match, expected, messages)), finished.stderr
    assert "Traceback" not in finished.stderr
    restarted.assert_equal(left_in(here / "run"), whole())


@pytest.mark.parametrize(
    ("kind", "event"),
    [("rank", "before_backward"), ("worker", "before_forward")],
)
@pytest.mark.slow
def test_all_ranks_restart_after_a_failure_on_one(here: Path, run_app: Any, whole: Any, kind: str, event: str):
    finished = run_app(*SHORT, HERE, TWO, *strikes(kind, event=event, rank=1))
    (line,) = restarts(finished.stderr)
    assert re.match(r"restart 1 of 3, from batch \d+, because the machine failed: rank 1: .*was killed by", line), line
    restarted.assert_equal(left_in(here / "run"), whole(TWO))


@pytest.mark.parametrize(
    "launcher", ["basic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("joblib", "submitit_local"))]
)
def test_only_the_failed_job_of_a_sweep_is_restarted(here: Path, run_app: Any, whole: Any, launcher: str):
    finished = run_app("-m", *SHORT, "seed=0,1", f"hydra/launcher={launcher}", *strikes("worker"))
    if launcher != "submitit_local":  # its processes write their output to files
        assert len(restarts(finished.stderr)) == 1, finished.stderr
    (folder,) = here.glob("outputs/sweeps/*/*/")
    first, second = (next(folder.glob(f"*seed{seed}*")) for seed in (0, 1))
    restarted.assert_equal(left_in(first), whole())
    assert len(restarts((first / "attempts" / "1" / "console.log").read_text())) == 1
    assert not (second / "attempts").exists()
    assert {json.loads((job / "result.json").read_text())["status"] for job in (first, second)} == {"FINISHED"}
    assert not re.search("QUEUED|FAILED", finished.stdout)


@pytest.mark.slow
def test_the_final_error_names_a_sample_that_kills_every_worker(here: Path, run_app: Any):
    finished = run_app(*SHORT, HERE, "data.deadly=17", *strikes("nothing", times=0), exit_code=75)
    messages = restarts(finished.stderr)
    assert [line.partition(" of")[0] for line in messages][-3:] == ["restart 1", "restart 2", "restart 3"]
    assert re.search(r"RuntimeError: data worker \d .* while it read sample 17; batch \d+ of epoch 1", finished.stderr)
    advice = "not restarted (3 restarts in a row made no progress); when the machine works again: "
    assert f"{advice}python -m runner resume run" in finished.stderr
    assert "resume" not in finished.stdout  # the attempts that are restarted must not tell the user to resume
    assert json.loads((here / "run" / "result.json").read_text())["error"]["code"] == "environment"
    assert not (here / "run" / "crash.zip").exists()


@pytest.mark.slow
def test_without_restarts_a_failed_run_leaves_a_checkpoint_to_resume(here: Path, run_app: Any, whole: Any):
    finished = run_app(*SHORT, HERE, "launch.restarts=0", *strikes("file", batch=6), exit_code=75)
    assert restarts(finished.stderr) == [] and finished.stderr.count("Traceback") == 1
    assert (here / "run" / "checkpoints" / "latest").resolve().name == "ep0-ba6"
    run_app("resume", "run")
    restarted.assert_equal(left_in(here / "run"), whole())


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [("error", 1, "ValueError: an error in the user's code"), ("signal", 75, "OSError: [Errno 28]")],
)
def test_errors_and_signals_of_the_user_do_not_restart_a_run(
    here: Path, run_app: Any, kind: str, code: int, message: str
):
    finished = run_app(*SHORT, HERE, *strikes(kind), exit_code=code)
    assert restarts(finished.stderr) == [] and message in finished.stderr


@pytest.mark.slow
def test_progress_resets_the_count_of_restarts_and_all_attempts_are_one_run(here: Path, run_app: Any):
    """With `--json` too: all attempts together print one object, and are one run in MLflow."""
    first = strikes("file", event="epoch_start", batch=0)
    later = ["+callbacks.more._target_=own.Strikes", "+callbacks.more.kind=file", "+callbacks.more.batch=9"]
    command = [*SHORT, "+callbacks=mlflow_logger", "launch.restarts=1", "--json", *first, *later]
    finished = run_app(*command, "+callbacks.more.times=2")
    messages = restarts(finished.stderr)
    assert [line.partition(",")[0] for line in messages] == ["restart 1 of 1"] * 2
    assert "from the beginning" in messages[0] and "from batch 9" in messages[1]
    answer = json.loads(finished.stdout)
    assert answer["exit_code"] == 0 and answer["error"] is None
    (run_dir,) = here.glob("outputs/20*/*")
    assert answer["result"]["folder"] == str(run_dir)
    left_in(run_dir)
    store = here / "outputs" / "mlflow.db"
    assert query(store, "select status from runs") == [("FINISHED",)]
    points = query(store, "select key, step from metrics where key not like 'system/%'")
    assert len({*points}) == len(points) > 50


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one megabyte and 64 files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs Linux, root and the permission to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("kind", "reason"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_training_continues_while_the_disk_fails_and_saves_again_afterwards(
    sessions: Any, tmp_path: Path, disk: Path, kind: str, reason: str
):
    sessions.run(fit, run_dir=tmp_path / "whole")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk, target_is_directory=True)

    def train_until(batch: int) -> None:
        kill = {"event": "batch_end", "batch": batch}
        sessions.run(fit_in_trouble, ends=KILLED, run_dir=run, kind=kind, disk=disk, kill=kill)

    train_until(10)  # the disk has just been repaired
    log = sessions.started[-1].log.read_text()
    assert log.count("was not written: ") == 1 and reason in log
    assert (disk / "latest").resolve() == disk / "ep0-ba3"
    train_until(13)
    assert (disk / "latest").resolve() == disk / "ep1-ba12"
    assert not [*disk.glob(".*")]

    sessions.run(fit, run_dir=run)
    assert_equal(run, read(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_does_not_fit_on_the_disk_is_restarted(tmp_path: Path, disk: Path, run_app: Any):
    folders = {"whole": tmp_path / "whole", "full": tmp_path / "full"}
    for folder in folders.values():
        prepare(folder)
    run = folders["full"] / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk, target_is_directory=True)
    keep = ("hydra.run.dir=run", "callbacks.checkpoint_saver.keep=1", "model.module.hidden=[32]")
    command = (*SHORT, *keep, *strikes("nothing", times=0))
    run_app(*command, folder=folders["whole"])
    full = ("+callbacks.full._target_=own.Full", f"+callbacks.full.disk={disk}")
    finished = run_app(*command, *full, folder=folders["full"])
    (line,) = restarts(finished.stderr)
    assert line.startswith(
        "restart 1 of 3, from batch 20, because the machine failed: OSError: the run's last checkpoint"
    )
    restarted.assert_equal(*(left_in(folder / "run") for folder in folders.values()))


def test_the_result_of_a_run_is_written_even_if_no_new_file_can_be_created(disk: Path):
    result = Result("RUNNING", "run", "", [])
    result.write(disk)
    fill(disk)
    result.status, result.error = "FAILED", {"message": "a trace\n" * 100}
    result.write(disk)
    assert read_result(disk) == result
    result.status, result.error = "FINISHED", None
    result.write(disk)
    assert read_result(disk) == result and not [*disk.glob(".*")]


@pytest.mark.slow
def test_a_run_that_cannot_begin_because_the_disk_is_full_may_be_tried_again(disk: Path, run_app: Any):
    fill(disk)
    finished = run_app(*main_runs.SHORT, f"hydra.run.dir={disk}/run", "launch.restarts=0", exit_code=75)
    (error,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert error.endswith("No space left on device") and "Traceback" not in finished.stderr


def fill(disk: Path) -> None:
    """Create files until the disk can hold no more."""
    with pytest.raises(OSError, match="No space left"):
        for number in range(64):
            (disk / f"{number}.taken").touch()


def test_training_survives_a_full_disk_without_mlflow_but_fails_if_the_last_checkpoint_is_lost(
    folder: Path, run_app: Any
):
    finished = run_app(
        *(
            *main_runs.SHORT,
            "+callbacks.full._target_=own.FullDisk",
            "callbacks.mlflow_logger.tracking_uri=http://127.0.0.1:9",
        ),
        "model.module.hidden=[1000]",
        exit_code=1,
    )
    (run_dir,) = main_runs.run_folders(folder)
    assert "WARNING: MLflow: " in finished.stderr and "http://127.0.0.1:9 cannot be reached" in finished.stderr
    assert finished.stderr.count("WARNING: MLflow: ") == 1
    assert finished.stderr.count("WARNING: checkpoint ") == 1 and "  2/2 " in finished.stdout
    assert "OSError: the run's last checkpoint was not written: make room, then resume\n" in finished.stderr
    assert not (run_dir / "checkpoints").exists() or list((run_dir / "checkpoints").iterdir()) == []
    assert list(run_dir.rglob("*.tmp")) == []
    assert main_runs.query(folder, "select count(*) from runs") == [(0,)]
