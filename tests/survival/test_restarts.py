"""A command whose machine fails begins again by itself, and leaves what an undisturbed one leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from restarted import SHORT, Left, assert_equal, left_in, prepare, restarts, strikes
from stores import query

TWO = "launch.nproc_per_node=2"
HERE = "hydra.run.dir=run"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def wholes() -> dict[str, Left]:
    """What undisturbed commands left, by their arguments."""
    return {}


@pytest.fixture
def whole(wholes: dict[str, Left], run_app: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what an undisturbed command leaves."""

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
def test_a_run_goes_on_from_its_checkpoint(
    here: Path, run_app: Any, whole: Any, kind: str, event: str, batch: int, expected: list[str]
):
    ended = run_app(*SHORT, HERE, *strikes(kind, event=event, batch=batch))
    found = restarts(ended.stderr)
    assert len(found) == len(expected) and all(map(re.match, expected, found)), ended.stderr
    assert "Traceback" not in ended.stderr
    assert_equal(left_in(here / "run"), whole())


@pytest.mark.parametrize(
    ("kind", "event"),
    [("rank", "before_backward"), pytest.param("worker", "before_forward", marks=pytest.mark.slow)],
)
def test_ranks_go_on_together(here: Path, run_app: Any, whole: Any, kind: str, event: str):
    ended = run_app(*SHORT, HERE, TWO, *strikes(kind, event=event, rank=1))
    (line,) = restarts(ended.stderr)
    assert re.match(r"restart 1 of 3, from batch \d+, because the machine failed: rank 1: .*was killed by", line), line
    assert_equal(left_in(here / "run"), whole(TWO))


@pytest.mark.parametrize(
    "launcher", ["basic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("joblib", "submitit_local"))]
)
def test_the_job_of_a_sweep_is_trained_again_alone(here: Path, run_app: Any, whole: Any, launcher: str):
    ended = run_app("-m", *SHORT, "seed=0,1", f"hydra/launcher={launcher}", *strikes("worker"))
    if launcher != "submitit_local":  # whose processes print into files of their own
        assert len(restarts(ended.stderr)) == 1, ended.stderr
    (folder,) = here.glob("outputs/sweeps/*/*/")
    first, second = (next(folder.glob(f"*seed{seed}*")) for seed in (0, 1))
    assert_equal(left_in(first), whole())
    assert len(restarts((first / "attempts" / "1" / "console.log").read_text())) == 1
    assert not (second / "attempts").exists()
    assert {json.loads((one / "result.json").read_text())["status"] for one in (first, second)} == {"FINISHED"}
    assert not re.search("QUEUED|FAILED", ended.stdout)


@pytest.mark.slow
def test_a_sample_that_kills_its_reader_is_named_in_the_end(here: Path, run_app: Any):
    ended = run_app(*SHORT, HERE, "data.deadly=17", *strikes("nothing", times=0), exit_code=75)
    found = restarts(ended.stderr)
    assert [line.partition(" of")[0] for line in found][-3:] == ["restart 1", "restart 2", "restart 3"]
    assert re.search(r"RuntimeError: data worker \d .* while it read sample 17; batch \d+ of epoch 1", ended.stderr)
    advice = "not restarted (3 restarts in a row have trained no further); when the machine is in order: "
    assert f"{advice}python -m runner resume run" in ended.stderr
    assert "resume" not in ended.stdout  # where three of four attempts would say what is not to be done
    assert json.loads((here / "run" / "result.json").read_text())["error"]["code"] == "environment"
    assert not (here / "run" / "crash.zip").exists()


@pytest.mark.slow
def test_without_restarts_it_ends_with_a_checkpoint_and_can_be_resumed(here: Path, run_app: Any, whole: Any):
    ended = run_app(*SHORT, HERE, "launch.restarts=0", *strikes("file", batch=6), exit_code=75)
    assert restarts(ended.stderr) == [] and ended.stderr.count("Traceback") == 1
    assert (here / "run" / "checkpoints" / "latest").resolve().name == "ep0-ba6"
    run_app("resume", "run")
    assert_equal(left_in(here / "run"), whole())


@pytest.mark.parametrize(
    ("kind", "code", "message"), [("error", 1, "ValueError: of the user"), ("signal", 75, "OSError: [Errno 28]")]
)
def test_errors_and_signals_of_the_user_are_not_answered_by_a_restart(
    here: Path, run_app: Any, kind: str, code: int, message: str
):
    ended = run_app(*SHORT, HERE, *strikes(kind), exit_code=code)
    assert restarts(ended.stderr) == [] and message in ended.stderr


@pytest.mark.slow
def test_progress_resets_the_count_and_the_run_stays_one(here: Path, run_app: Any):
    """Of a program that reads JSON, too: all attempts together give one object, and one run in MLflow."""
    first = strikes("file", event="epoch_start", batch=0)
    later = ["+callbacks.more._target_=own.Strikes", "+callbacks.more.kind=file", "+callbacks.more.batch=9"]
    command = [*SHORT, "+callbacks=mlflow_logger", "launch.restarts=1", "--json", *first, *later]
    ended = run_app(*command, "+callbacks.more.times=2")
    found = restarts(ended.stderr)
    assert [line.partition(",")[0] for line in found] == ["restart 1 of 1"] * 2
    assert "from the beginning" in found[0] and "from batch 9" in found[1]
    answer = json.loads(ended.stdout)
    assert answer["exit_code"] == 0 and answer["error"] is None
    (run_dir,) = here.glob("outputs/20*/*")
    assert answer["result"]["folder"] == str(run_dir)
    left_in(run_dir)
    store = here / "outputs" / "mlflow.db"
    assert query(store, "select status from runs") == [("FINISHED",)]
    points = query(store, "select key, step from metrics where key not like 'system/%'")
    assert len({*points}) == len(points) > 50
