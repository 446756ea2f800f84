"""Forks: independent runs that begin after a batch of a parent, record it, and outlive it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kept_runs import tree
from python_process import run_python
from stores import query

from runner.checkpoints.digest import read_digests
from runner.history.forks import batch_of
from runner.records.listing import SavedFolder
from runner.records.result import Result, read_result
from runner.verbs.runs import as_tree

SMALL = ("model=mlp", "data.batch_size=200", "trainer.max_duration=3ep", "callbacks.checkpoint_saver.keep=-1")  # 18
SAVES = "callbacks.checkpoint_saver.save_interval=4ba"
QUIET = ("callbacks=[checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba")


def train(folder: Path, *arguments: str) -> Path:
    run_python(["-m", "runner", *arguments, SAVES, "hydra.run.dir=parent"], cwd=folder, check=True)
    return folder / "parent"


@pytest.fixture(scope="module")
def with_all_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with a checkpoint after every fourth batch."""
    return train(tmp_path_factory.mktemp("all"), *SMALL, *QUIET)


@pytest.fixture(scope="module")
def with_two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run whose algorithms have state and which keeps only its last two checkpoints."""
    curves = "callbacks=[checkpoint_saver,state_digest,learning_curves]"
    more = ("+algorithms=[mixup,ema]", curves, QUIET[1], "callbacks.checkpoint_saver.keep=2")
    return train(tmp_path_factory.mktemp("two"), *SMALL[:3], *more, "trainer.eval_interval=5ba")


@pytest.fixture
def parent(with_all_checkpoints: Path, tmp_path: Path) -> Path:
    """Copy the run with all checkpoints."""
    return shutil.copytree(with_all_checkpoints, tmp_path / "parent", symlinks=True)


def digests_of(run: Path) -> dict[int, Any]:
    """Return the lines of a run's digests by batch."""
    return {line["batch"]: line for line in read_digests(run)}


def test_a_fork_continues_after_a_batch_and_leaves_its_parent_unchanged(parent: Path, tmp_path: Path, run_here: Any):
    before = tree(parent)
    run_here("fork", "parent", "ba8", "hydra.run.dir=same", code=0)
    run_here("fork", "parent", "8ba", "optimizer.lr=0.01", "hydra.run.dir=child", code=0)
    assert tree(parent) == before
    whole, same, child = (digests_of(tmp_path / run) for run in ("parent", "same", "child"))
    assert [*same] == [*child] == [*range(9, 19)]
    assert all(same[batch] == whole[batch] for batch in same)
    assert child[9]["samples"] == whole[9]["samples"] and child[9]["weights"] != whole[9]["weights"]
    result = read_result(tmp_path / "child")
    assert result is not None and (result.parent, result.forked_at, result.status) == (str(parent), 8, "FINISHED")
    assert [path.name for path in (tmp_path / "child" / "fork").iterdir()] == ["ep1-ba8"]
    copied, original = (tmp_path / path / "model.pt" for path in ("child/fork/ep1-ba8", "parent/checkpoints/ep1-ba8"))
    assert copied.samefile(original)  # a hard link, which takes no space
    recorded = json.loads((tmp_path / "child" / "environment.json").read_text())
    assert (recorded["verb"], recorded["from_batch"]) == ("fork", 8)
    assert recorded["from_checkpoint"] == str(copied.parent)

    shutil.rmtree(parent)  # the fork does not need it
    replayed = json.loads(run_here("replay", "child", "9", "--picture=", "--json", code=0).out)["result"]
    assert replayed["equal"] is True and replayed["from_batch"] == 8
    run_here("resume", "child", "trainer.max_duration=4ep", code=0)
    again = read_result(tmp_path / "child")
    assert again is not None and (again.parent, again.forked_at) == (str(parent), 8)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 6, 11])  # before the first checkpoint, and at the end of an epoch of 6
def test_a_fork_between_checkpoints_retrains_the_batches_of_the_parent(
    batch: int, with_two_checkpoints: Path, tmp_path: Path, run_here: Any
):
    shutil.copytree(with_two_checkpoints, tmp_path / "parent", symlinks=True)
    before = tree(tmp_path / "parent")
    done = run_here("fork", "parent", str(batch), "hydra.run.dir=same", code=0)
    run_here("fork", "parent", str(batch), "optimizer.lr=0.01", "hydra.run.dir=child", code=0)
    assert tree(tmp_path / "parent") == before
    again = "batch 1 is" if batch == 1 else f"batches 1 to {batch} are"
    assert f"its {again} retrained" in done.out  # all but the last two checkpoints were deleted
    assert f"ok digests  equal bit for bit up to batch {batch}" in done.out
    whole, same, child = (digests_of(tmp_path / run) for run in ("parent", "same", "child"))
    assert [*same] == [*child] == [*range(batch + 1, 19)]
    assert all(same[number] == whole[number] for number in same)
    first = batch + 1
    assert child[first]["gradients"] == whole[first]["gradients"] != child[first]["weights"] != whole[first]["weights"]
    curves, expected = ((tmp_path / run / "learning_curves.csv").read_text() for run in ("same", "parent"))
    assert curves == expected  # with the batches of the parent
    result = read_result(tmp_path / "child")
    assert result is not None and (result.forked_at, result.status) == (batch, "FINISHED")


@pytest.mark.slow
def test_verbs_refuse_batches_that_a_fork_did_not_train(parent: Path, tmp_path: Path, run_here: Any):
    run_here("fork", "parent", "ba7", "optimizer.lr=0.01", "hydra.run.dir=child", code=0)
    done = run_here("verify", "child", code=0).out  # compares only batches of the fork
    assert "equal bit for bit up to batch 18; 11 digests compared" in done
    begins = f"this run is a fork that begins after batch 7 of its parent; name the parent, '{tmp_path / 'parent'}'"
    assert f"BATCH=7: {begins}" in run_here("replay", "child", "7", code=2).err
    assert f"BATCH=5: {begins}" in run_here("fork", "child", "ba5", code=2).err
    assert "a fork has none" in run_here("verify", "child", "--pin=x.yaml", code=125).err
    run_here("fork", "child", "ba7", "hydra.run.dir=same", code=0)
    assert digests_of(tmp_path / "same") == digests_of(tmp_path / "child")


def test_a_fork_of_a_fork_is_listed_below_it(parent: Path, tmp_path: Path, run_here: Any, monkeypatch: Any):
    monkeypatch.setenv("COLUMNS", "200")
    run_here("fork", "parent", "4", "optimizer.lr=0.01", code=0)
    (child,) = tmp_path.glob("outputs/20*/*")
    run_here("fork", str(child), "ba12", "optimizer.momentum=0.5", code=0)
    (grandchild,) = {*tmp_path.glob("outputs/20*/*")} - {child}
    table = run_here("runs", code=0).out
    assert f"└ ba12 outputs/{grandchild.relative_to(tmp_path / 'outputs')}" in table
    described = json.loads(run_here("runs", "--json", code=0).out)["result"]["runs"]
    assert {(row["parent"], row["forked_at"]) for row in described} == {(str(parent), 4), (str(child), 12)}


def test_results_with_circular_or_missing_parents_still_make_a_tree(tmp_path: Path):
    def run(name: str, parent: str = "") -> SavedFolder:
        (tmp_path / name).mkdir()
        return SavedFolder(tmp_path / name, Result("FINISHED", name, "", [], parent=parent and str(tmp_path / parent)))

    runs = [run("b", "a"), run("a"), run("c", "b"), run("x", "y"), run("y", "x"), run("self", "self"), run("lost", "?")]
    ordered, depths = as_tree(runs)
    assert [(run.folder.name, depth) for run, depth in zip(ordered, depths, strict=True)] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("self", 0),
        ("lost", 0),
        ("x", 0),
        ("y", 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fork", "parent", "ba19"), "BATCH=19: the last batch of this run is 18"),
        (("fork", "parent", "ba5", "optimizer=adamw"), "a run cannot continue with another optimizer"),
        (("fork", "parent", "soon"), "BATCH='soon': must be the number of a batch"),
        (("fork", "parent", "0"), "BATCH='0': must be the number of a batch"),
        (("fork", "parent"), "fork: takes RUN BATCH, not parent; write runner fork RUN BATCH"),
        (("fork", "parent", "ba4,ba5"), "BATCH='ba4,ba5': takes one batch; add -m to begin a fork at each"),
        (("fork", "parent", "ba4", "--allow-changes=seed"), "--allow-changes: is an option of resume"),
    ],
)
def test_an_impossible_fork_is_one_error_and_leaves_nothing(
    parent: Path, tmp_path: Path, run_here: Any, arguments: tuple[str, ...], message: str
):
    error = run_here(*arguments, code=2).err
    assert message in error and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["parent"]


@pytest.mark.parametrize(("typed", "batch"), [("ba12", 12), ("12ba", 12), ("12", 12), ("1ep", None), (None, None)])
def test_a_batch_is_parsed_from_three_spellings(typed: str | None, batch: int | None):
    assert batch_of(typed) == batch


@pytest.mark.slow
def test_two_ranks_fork_together_and_mlflow_nests_the_fork(tmp_path: Path, run_app: Any):
    callbacks = ("callbacks=[mlflow_logger,checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba")
    run_app(*SMALL, *callbacks, SAVES, "hydra.run.dir=parent", "launch.nproc_per_node=2")
    run_app("fork", "parent", "ba8", "hydra.run.dir=child")
    whole, child = (digests_of(tmp_path / run) for run in ("parent", "child"))
    assert [*child] == [*range(9, 19)] and all(child[batch] == whole[batch] for batch in child)
    run_app("fork", "parent", "ba11", "hydra.run.dir=between")
    between = digests_of(tmp_path / "between")
    assert [*between] == [*range(12, 19)] and all(between[batch] == whole[batch] for batch in between)
    ids = [json.loads((tmp_path / run / "mlflow" / "sent.json").read_text())["run_id"] for run in ("parent", "child")]
    assert ids[0] != ids[1]
    tags = dict(query(tmp_path / "outputs/mlflow.db", "select key, value from tags where run_uuid = ?", ids[1]))
    assert tags["mlflow.parentRunId"] == ids[0]
    assert (tags["runner.parent"], tags["runner.forked_at"]) == (str(tmp_path / "parent"), "8")
