"""Sweeps whose jobs train what they have in common once, as commands: equal to the bit to jobs that train alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from main_runs import query
from sweep_runs import statuses

from runner import first_difference
from runner.checkpoints.snapshot import read_timestamp
from runner.runs.result import Result, read_result
from runner.sweeps.sharing.nodes import SHARED

SHORT = ("model=mlp", "data.batch_size=200", "data.eval_batch_size=300", "trainer.max_duration=4ep")  # 24 batches
DECAY = ("scheduler=warmup_stable_decay", "scheduler.t_warmup=0ba")
CALLBACKS = ("callbacks=[checkpoint_saver,state_digest,json_lines_logger]", "callbacks.state_digest.interval=1ba")
QUIET = (*SHORT, *DECAY, *CALLBACKS)
POINTS = ("scheduler.t_decay=0.25dur,0.5dur", "scheduler.alpha_f=0,0.1")
NAMES = [f"alpha_f{rate}-t_decay{decay}dur-mlp-digits" for decay in ("0.25", "0.5") for rate in ("0", "0.1")]
STARTS = [0, 19, 13, 13]

OWN = """
import os
import signal
from pathlib import Path

from runner import Callback


class Note(Callback):
    '''Notes each batch, and ends a job once, as asked.'''

    def __init__(self, ends="", batch=9, who=""):
        self.ends, self.batch, self.who = ends, batch, who

    def effect_at(self, state):
        return None

    def batch_start(self, state, logger):
        with open("batches.txt", "a") as file:
            file.write(f"{state.run_name} {state.timestamp.batch}\\n")
        is_now = state.timestamp.batch == self.batch and state.run_name.startswith(self.who)
        if self.ends and is_now and not Path("ended").exists():
            Path("ended").touch()
            if self.ends == "error":
                raise RuntimeError("a callback that fails")
            os.kill(os.getpid(), getattr(signal, self.ends))
"""
NOTE = "+callbacks.note._target_=own.Note"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's `own.py`."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def result_of(run: Path) -> Result:
    result = read_result(run)
    assert result is not None
    return result


def batches(folder: Path) -> list[str]:
    lines = (folder / "batches.txt").read_text().splitlines()
    (folder / "batches.txt").unlink()
    return lines


def logged(run: Path) -> list[Any]:
    """What a run logged, by batch, epoch and key, without times; how values share lines is a matter of timing."""
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [(one["step"], one["epoch"], *pair) for one in entries for pair in one.get("metrics", {}).items()]
    return sorted(one for one in kept if not one[2].startswith("time"))


def assert_equal(run: Path, alone: Path) -> None:
    """Both have trained the same from the first batch to the last, and have the same to show for it."""
    found = first_difference(run, alone)
    assert found.batch is None and (run / "digests.jsonl").read_bytes() == (alone / "digests.jsonl").read_bytes()
    assert logged(run) == logged(alone)
    assert result_of(run).metrics == result_of(alone).metrics and result_of(run).status == "FINISHED"
    saved, its = ({one.name for one in folder.glob("checkpoints/*")} for folder in (run, alone))
    assert saved == its
    for name in saved:
        assert (run / "checkpoints" / name).resolve().name == (alone / "checkpoints" / name).resolve().name
        weights = [(folder / "checkpoints" / name / "model.pt").read_bytes() for folder in (run, alone)]
        assert weights[0] == weights[1]
    assert not (run / "fork").exists()


def test_jobs_that_share_are_equal_to_the_bit_to_jobs_alone(folder: Path, run_here: Any):
    best = ("callbacks.checkpoint_saver.monitor=eval/loss", "callbacks.checkpoint_saver.keep=1")
    command = ("-m", *POINTS, *QUIET, *best, NOTE)
    run_here(*command, "hydra.sweep.dir=alone", code=0)
    assert len(batches(folder)) == 4 * 24
    done = run_here(*command, "share=true", "hydra.sweep.dir=shared", code=0)
    assert "share: 4 jobs train 51 batches instead of 96, 47% less" in done.out and done.err == ""
    assert [one.count("from batch 14") for one in done.out.splitlines()].count(1) == 2
    assert batches(folder) == [
        f"{name} {batch}" for name, start in zip(NAMES, STARTS, strict=True) for batch in range(start, 24)
    ]
    for name, start in zip(NAMES, STARTS, strict=True):
        run = folder / "shared" / name
        assert_equal(run, folder / "alone" / name)
        result = result_of(run)
        assert (result.forked_at, result.shares) == (start, start > 0)
        assert result.parent == (str(folder / "shared" / NAMES[0]) if start else "")
        assert json.loads((run / "environment.json").read_text())["from_batch"] == start
    assert not (folder / "shared" / SHARED).exists()  # nobody needs the checkpoints of nodes any more


@pytest.mark.slow
def test_a_job_that_began_with_another_can_be_trained_again_and_verified(folder: Path, run_here: Any):
    command = ("-m", *POINTS, *QUIET, "share=true", "hydra.sweep.dir=shared")
    run_here(*command, code=0)
    leaf = folder / "shared" / NAMES[3]
    run_here(f"rerun={leaf}", "hydra.run.dir=again", code=0)
    assert_equal(folder / "again", leaf)
    assert result_of(folder / "again").forked_at == 0
    verified = run_here("verify", str(leaf), "verify.batches=24", code=0)
    assert "equal to the bit up to batch 24; 24 digests compared" in verified.out
    assert run_here(*command, code=0).out.count("skipped: it has already ended") == 4


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["error", "SIGTERM"])
def test_a_job_that_ends_before_the_others_need_it_is_replaced_and_goes_on(folder: Path, run_here: Any, ends: str):
    run_here("-m", *POINTS, *QUIET, NOTE, "hydra.sweep.dir=alone", code=0)
    batches(folder)
    command = ("-m", *POINTS, *QUIET, NOTE, f"+callbacks.note.ends={ends}", "share=true", "hydra.sweep.dir=shared")
    done = run_here(*command)
    shared = folder / "shared"
    found = batches(folder)
    if ends == "error":  # the next job trains in its place, and the others begin from that
        assert done.code == 1
        assert statuses(shared) == dict(zip(NAMES, ["FAILED", *["FINISHED"] * 3], strict=True))
        assert found[:10] == [f"{NAMES[0]} {batch}" for batch in range(10)]
        assert found[10:] == [f"{NAMES[1]} {batch}" for batch in range(24)] + [
            f"{name} {batch}" for name in NAMES[2:] for batch in range(13, 24)
        ]
    else:
        assert done.code == 143 and statuses(shared) == {NAMES[0]: "KILLED"}
    assert (shared / SHARED).exists()
    run_here(*command, code=0)
    assert batches(folder)[0] == f"{NAMES[0]} {10 if ends == 'SIGTERM' else 9}"  # from the checkpoint at its end
    for name in NAMES:
        assert_equal(shared / name, folder / "alone" / name)
    assert not (shared / SHARED).exists()


@pytest.mark.slow
def test_a_killed_job_goes_on_from_where_it_began(folder: Path, run_app: Any):
    """It has a copy of the node, and tells destinations again what they may have lost."""
    command = ("-m", *POINTS, *QUIET, "callbacks.checkpoint_saver.save_interval=0", NOTE)
    run_app(*command, "hydra.sweep.dir=alone")
    killing = (*command, "+callbacks.note.ends=SIGKILL", "+callbacks.note.batch=15", f"+callbacks.note.who={NAMES[3]}")
    shared = (*killing, "share=true", "hydra.sweep.dir=shared")
    run_app(*shared, exit_code=-9)
    leaf = folder / "shared" / NAMES[3]
    assert [one.name for one in leaf.glob("fork/ba*")] == ["ba13"] and not [*leaf.glob("checkpoints/ba*")]
    assert not [*(folder / "shared" / SHARED).glob("ba*/ba*")]  # nobody else needs it
    batches(folder)
    run_app(*shared)
    assert batches(folder) == [f"{NAMES[3]} {batch}" for batch in range(13, 24)]
    for name in NAMES:
        assert_equal(folder / "shared" / name, folder / "alone" / name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_jobs_share_in_parallel_and_on_ranks(folder: Path, run_app: Any, ranks: int):
    command = ("-m", *POINTS, *QUIET, NOTE, f"launch.nproc_per_node={ranks}", "launch.threads=1")
    run_app(*command, "hydra.sweep.dir=alone")
    batches(folder)
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    run_app(*command, *joblib, "share=true", "hydra.sweep.dir=shared")
    assert len(batches(folder)) == 51 * ranks
    for name in NAMES:
        assert_equal(folder / "shared" / name, folder / "alone" / name)


OTHERS = {
    "durations": ("trainer.max_duration=2ep,4ep", "scheduler=constant"),
    "evaluations": ("trainer.eval_interval=1ep,2ep", "scheduler=constant"),
    "stopper": (
        "scheduler=constant",
        "+callbacks=early_stopper",
        "callbacks.early_stopper.monitor=loss",
        "callbacks.early_stopper.min_delta=10",
        "callbacks.early_stopper.patience=0ep,1ep",
    ),
    "average": ("+algorithms=ema", "algorithms.ema.start=0.4dur,0.6dur", "algorithms.ema.half_life=3ba"),
    "swa": ("+algorithms=swa", "algorithms.swa.start=0.3dur,0.8dur", "algorithms.swa.update_interval=2ba"),
    "freezing": ("+algorithms=layer_freezing", "algorithms.layer_freezing.freeze_start=0.3,0.6"),
    "selection": ("+algorithms=selective_backprop", "algorithms.selective_backprop.start=0.3,0.6"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_whatever_begins_later_is_equal_to_the_bit(folder: Path, run_here: Any, case: str):
    command = ("-m", *SHORT, *DECAY, *CALLBACKS, *OTHERS[case])
    run_here(*command, "hydra.sweep.dir=alone", code=0)
    assert "less" in run_here(*command, "share=true", "hydra.sweep.dir=shared", code=0).out
    runs = [one.parent for one in folder.glob("shared/[!.]*/result.json")]
    assert len(runs) == 2 and sum(result_of(one).forked_at > 0 for one in runs) == 1
    for run in runs:
        assert_equal(run, folder / "alone" / run.name)


def test_mlflow_has_the_whole_curve_of_each_job(folder: Path, run_here: Any):
    command = ("-m", *SHORT, *DECAY, "scheduler.alpha_f=0,0.1", "callbacks=[mlflow_logger,checkpoint_saver]")
    run_here(*command, "share=true", code=0)
    series = "select m.key, m.step, m.value from metrics m join tags t using (run_uuid) where t.key = 'runner.job'"
    own = "and (m.key like 'loss/%' or m.key like 'best/%') and t.value = ? order by 1, 2"
    first, second = (query(folder, f"{series} {own}", job) for job in ("0", "1"))
    losses, its = ([one[:2] for one in rows if one[0].startswith("loss/")] for rows in (first, second))
    assert losses == its and len(losses) == 24 + 4
    before, same = ([one for one in rows if one[1] <= 15] for rows in (first, second))
    assert before == same and len(before) == 15 + 2 + 2 * 2
    ((parent,),) = query(folder, "select value from tags where key = 'runner.parent'")
    assert Path(parent).is_dir() and query(folder, "select value from tags where key = 'runner.forked_at'") == [("15",)]
    assert not query(folder, "select 1 from tags where key = 'mlflow.parentRunId'")  # flat, as jobs of a sweep are


def test_explain_shows_the_tree_before_anything_trains(folder: Path, run_here: Any):
    shown = run_here("-m", "mode=explain", "share=true", *POINTS, *QUIET, code=0)
    assert shown.out.splitlines() == [
        "share: 4 jobs train 51 batches instead of 96, 47% less",
        "job                            batches  apart by",
        "alpha_f=0 t_decay=0.25dur      1-24",
        "└ alpha_f=0 t_decay=0.5dur     14-24    scheduler",
        "└ alpha_f=0.1 t_decay=0.5dur   14-24    scheduler",
        "└ alpha_f=0.1 t_decay=0.25dur  20-24    scheduler",
    ]
    assert not [*folder.glob("outputs/**/*.json")]
    told = json.loads(run_here("-m", "mode=explain", "explain.format=json", "share=true", *POINTS, *QUIET, code=0).out)
    assert (told["batches"], told["batches_alone"]) == (51, 96)
    assert [(one["parent"], one["start"], one["end"]) for one in told["jobs"]] == [
        (None, 0, 24),
        (0, 19, 24),
        (0, 13, 24),
        (0, 13, 24),
    ]
    assert told["jobs"][1]["overrides"] == ["scheduler.t_decay=0.25dur", "scheduler.alpha_f=0.1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("share=true",), "share=true: is for the jobs of a sweep; add -m"),
        (("-m", "seed=0,1", "share=1"), "share=1: must be true or false"),
        (("-m", "seed=0,1", "share=true", "mode=check"), "share=true: is for training; mode=check trains nothing"),
        (
            ("-m", "seed=0,1", "share=true", "+callbacks=sweep_pruner"),
            "share=true: callbacks.sweep_pruner compares jobs at their beginning",
        ),
        (("-m", "seed=0,1", "share=true", "resume=there"), "resume"),
    ],
)
def test_wrong_commands_say_what_to_write(tmp_path: Path, run_here: Any, arguments: tuple[str, ...], said: str):
    ended = run_here(*SHORT, *arguments, "callbacks=none", code=2)
    assert said in ended.err
    assert not [*tmp_path.glob("outputs/**/result.json")]


def test_a_checkpoint_says_where_its_run_stood(folder: Path, run_here: Any):
    """The batch at which others begin is not one at which the saver would have saved."""
    command = ("-m", *POINTS, *QUIET, NOTE, "+callbacks.note.ends=SIGTERM", "+callbacks.note.batch=20")
    run_here(*command, "share=true", "hydra.sweep.dir=shared", code=143)
    nodes = sorted((folder / "shared" / SHARED).glob("*/ba*"))
    assert [(one.name, read_timestamp(one).batch) for one in nodes] == [("ba13", 13), ("ba19", 19)]
