"""Commands of sweeps: which jobs are trained, refused, skipped and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from main_runs import query
from python_process import PATIENCE
from sweep_runs import LOGGED, OWN, QUIET, SHORT, batches, six, statuses, sweeps
from tiers import fast

from runner.records import folder as run_folder

EXITING = """
import sys

from runner.data.images.digits import load_digits


def load(batch_size, **options):
    if batch_size == 7:
        sys.exit("no images: download them first")
    return load_digits(batch_size=batch_size, **options)
"""

REFUSING = """
from torch import nn

from runner.data.images.digits import load_digits


class Net(nn.Linear):
    def __init__(self, units: int) -> None:
        super().__init__(64, units)
        self.scale = float(self.weight.sum())  # the meta device has no values


def load(batch_size: int):
    return load_digits(batch_size=batch_size) if batch_size != 7 else {}["seven"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's `own.py` and `refusing.py`."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "refusing.py").write_text(REFUSING)
    return tmp_path


@pytest.mark.slow
def test_the_same_sweep_trains_nothing_again_unless_afresh(run_here: Any, folder: Path):
    run_here("-m", "optimizer.lr=0.01,0.03", "seed=0,1", *QUIET, code=0)
    (sweep,) = sweeps(folder)
    names = [f"lr{lr}-seed{seed}-mlp-digits" for lr in (0.01, 0.03) for seed in (0, 1)]
    assert statuses(sweep) == dict.fromkeys(names, "FINISHED")
    assert batches(folder) == six(*names)

    # The order of arguments does not matter.
    again = run_here("-m", "seed=0,1", "optimizer.lr=0.01,0.03", *QUIET)
    assert again.code == 0 and batches(folder) == [] and sweeps(folder) == [sweep]
    assert again.out.count("skipped: it has already ended") == 4
    assert "--afresh trains these again, in a new sweep" in again.out
    assert "4 finished" in again.out

    assert run_here("-m", "optimizer.lr=0.01,0.03", "seed=0,1", "model.module.hidden=[8]", *QUIET).code == 0
    assert len(sweeps(folder)) == 2 and len(batches(folder)) == 24  # another config is another sweep
    # Numbers make the names of its jobs unique in MLflow.
    assert statuses(sweeps(folder)[1]) == {f"{name}-2": "FINISHED" for name in names}

    assert run_here("-m", "optimizer.lr=0.01,0.03", "seed=0,1", "--afresh", *QUIET).code == 0
    assert len(sweeps(folder)) == 3 and len(batches(folder)) == 24
    assert run_here("-m", "optimizer.lr=0.01,0.03", "seed=0,1", *QUIET).code == 0
    assert len(sweeps(folder)) == 3 and batches(folder) == []  # reruns now continue the new sweep

    shutil.rmtree(sweeps(folder)[-1])
    assert run_here("-m", "optimizer.lr=0.01,0.03", "seed=0,1", *QUIET).code == 0
    assert len(batches(folder)) == 24


@pytest.mark.slow
def test_a_job_that_was_resumed_with_changes_is_left_out_of_its_sweep(run_here: Any, folder: Path):
    command = ("-m", "seed=0,1", *QUIET)
    assert run_here(*command).code == 0
    (sweep,) = sweeps(folder)
    files = ("settings.csv", "jobs.csv", "results.json")
    before = [(sweep / name).read_text().splitlines()[0] for name in files]
    (before_setting,) = json.loads((sweep / "results.json").read_text())["settings"]
    longer = run_here("resume", "latest", "trainer.max_duration=4ep", code=0)
    assert "(a job of a sweep: there is no other run)" in longer.err
    (changed,) = {line.split()[0] for line in batches(folder) if int(line.split()[1]) >= 6}
    shutil.copytree(sweep / "seed0-mlp-digits", sweep / "backup")

    again = run_here(*command, code=0)
    assert "2/2" in again.out and "3/2" not in again.out and "2 finished" in again.out
    assert again.out.count("skipped: it has already ended") == 1
    assert f"left out  backup, {changed}: runs of another length or config, or copies" in again.out
    assert batches(folder) == six(f"{changed}-2")
    assert [(sweep / name).read_text().splitlines()[0] for name in files] == before
    (setting,) = json.loads((sweep / "results.json").read_text())["settings"]
    assert (setting["mean"], setting["spread"], setting["n"]) == (before_setting["mean"], before_setting["spread"], 2)

    table = run_here("table", str(sweep), code=0)
    assert table.err.count("left out") == 1, table.err
    assert "(2)" in table.out and "backup" not in table.out


@pytest.mark.slow
def test_a_job_with_a_changed_config_replaces_the_previous_one(run_here: Any, folder: Path):
    experiment = folder / "conf" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\noptimizer:\n  lr: 0.01\n")
    command = ("-m", "experiment=mine,digits_plain", *QUIET)
    assert run_here(*command).code == 0
    experiment.write_text("# @package _global_\noptimizer:\n  lr: 0.02\n")
    batches(folder)
    again = run_here(*command, code=0)
    assert "2/2" in again.out and "3/2" not in again.out and "2 finished" in again.out
    (name,) = {line.split()[0] for line in batches(folder)}
    assert "mine" in name and name.endswith("-2")


@pytest.mark.slow
def test_forks_at_several_batches_are_separate_jobs(run_here: Any, folder: Path):
    assert run_here(*QUIET, "callbacks.checkpoint_saver.save_interval=1ba").code == 0
    (run,) = folder.glob("outputs/20*/*")
    run_here("-m", "fork", str(run), "ba4,ba5", code=0)
    (sweep,) = sweeps(folder)
    assert statuses(sweep) == {"at_ba4-mlp-digits": "FINISHED", "at_ba5-mlp-digits": "FINISHED"}


def test_a_failed_job_resumes_from_its_checkpoint_and_the_others_run(run_here: Any, folder: Path):
    command = ("-m", "seed=0,1,2", "+callbacks.own.ends=error", *QUIET)
    finished = run_here(*command, code=1)
    assert finished.err.count("RuntimeError: a callback that fails") == 1
    assert "2 finished, 1 failed" in finished.out
    (line,) = (line for line in finished.out.splitlines() if line.startswith("2/3  seed=1  FAILED"))
    assert line.endswith("  RuntimeError: a callback that fails")
    (sweep,) = sweeps(folder)
    names = [f"seed{seed}-mlp-digits" for seed in range(3)]
    assert statuses(sweep) == dict(zip(names, ("FINISHED", "FAILED", "FINISHED"), strict=True))
    assert "a callback that fails" in json.loads((sweep / "seed1-mlp-digits" / "result.json").read_text())["trace"]
    batches(folder)
    run_here(*command, code=0)
    assert batches(folder) == [f"seed1-mlp-digits {batch}" for batch in (4, 5)]  # from the batch before the error
    assert set(statuses(sweep).values()) == {"FINISHED"}


@pytest.mark.slow
def test_a_job_cut_off_after_its_last_batch_finishes_without_training(run_here: Any, folder: Path):
    assert run_here("-m", "seed=0,1", *QUIET).code == 0
    (sweep,) = sweeps(folder)
    file = sweep / "seed1-mlp-digits" / "result.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps({**before, "status": "RUNNING", "objective": None, "metrics": {}}))
    batches(folder)
    assert run_here("-m", "seed=0,1", *QUIET).code == 0
    assert batches(folder) == []
    after = json.loads(file.read_text())
    assert after["status"] == "FINISHED" and after["objective"] == before["objective"] is not None


def test_data_that_call_exit_are_reported_and_the_other_jobs_run(run_here: Any, folder: Path):
    (folder / "exiting.py").write_text(EXITING)
    finished = run_here("-m", "data._target_=exiting.load", *SHORT, "callbacks=none", "data.batch_size=7,400", code=2)
    assert "data: no images: download them first (exiting.load)" in finished.err
    assert "1 finished" in finished.out


@pytest.mark.slow
def test_a_job_whose_process_is_terminated_is_reported_as_killed(run_here: Any, folder: Path):
    jobs = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    finished = run_here("-m", "seed=0,1", *QUIET, "+callbacks.own.ends=SIGTERM", *jobs, code=1)
    assert "1 finished, 1 killed" in finished.out


def test_no_job_starts_if_one_has_a_wrong_value(run_here: Any, folder: Path):
    finished = run_here("-m", "optimizer.lr=0.1,0.2,x", *QUIET, code=2)
    assert finished.out == ""
    assert finished.err.splitlines() == ["error: optimizer.lr='x': torch.optim.SGD takes a number"]
    assert batches(folder) == [] and not (folder / "outputs").exists()


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_no_job_starts_if_a_constructor_refuses_one(launcher: str, run_here: Any, folder: Path):
    """`Net` reads values, so it is not created on the meta device but on the CPU."""
    own = ("~model.module", "+model.module._target_=refusing.Net", "+model.module.units=4,-3", *QUIET)
    finished = run_here("-m", *own, "seed=0,1", f"hydra/launcher={launcher}", code=2)
    assert finished.out == ""
    message, job = finished.err.splitlines()
    assert message.startswith("error: model.module: RuntimeError: Trying to create tensor with negative dimension -3")
    assert "(refusing.Net) [" in message and "refusing.py:" in message
    assert job == "  in the job +model.module.units=-3 seed=0"
    assert batches(folder) == [] and not (folder / "outputs").exists()


@pytest.mark.slow
def test_a_refused_job_leaves_no_folder_and_the_others_run(run_here: Any, folder: Path):
    """The data are created only when a job starts."""
    data = ("~data", "+data._target_=refusing.load")
    overrides = ("model=mlp", *data, "callbacks=[checkpoint_saver]", "trainer.max_duration=1ba")
    finished = run_here("-m", "+data.batch_size=7,400", "seed=0,1", *overrides, code=2)
    message, job = finished.err.splitlines()
    assert message.startswith("error: data: KeyError: 'seven' (refusing.load)")
    assert job == "  in the job +data.batch_size=7 seed=0 and 1 more"
    assert "2 finished, 2 refused" in finished.out
    (sweep,) = sweeps(folder)
    assert statuses(sweep) == {f"batch_size400-seed{seed}-mlp-own-data": "FINISHED" for seed in (0, 1)}
    assert not any(path.name.startswith(".refused") for path in sweep.iterdir())
    shutil.rmtree(folder / "outputs")

    finished = run_here("-m", "+data.batch_size=7", "seed=0,1,2", *overrides, code=2)
    assert finished.err.count("error: ") == 1  # an error of all jobs is printed once
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    fast(
        [
            ("sweep=seeds", "sweep=seeds: is for several runs; add -m"),
            ("-m resume outputs seed=0,1", "-m: resume takes one experiment at a time"),
            ("-m rerun outputs seed=0,1", "RUN='outputs': no such folder"),
            ("-m objective=nothing seed=0,1", "objective='nothing': this run has no such metric; allowed: eval/Multi"),
            ("-m sweep=seedz", "sweep=seedz: no such choice; did you mean 'seeds'"),
        ],
        *("sweep=seeds", "-m sweep=seedz"),
    ),
)
def test_a_wrong_sweep_command_is_refused(run_here: Any, folder: Path, command: str, message: str):
    finished = run_here(*command.split(), *QUIET, code=2)
    assert message in finished.err and finished.err.count("error: ") == 1
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("choice", "package"),
    fast(
        [
            ("hydra/launcher=joblib", "hydra-joblib-launcher"),
            ("hydra/launcher=submitit_local", "hydra-submitit-launcher"),
            ("sweep=optuna_tpe", "optuna, and pip install --no-deps hydra-optuna-sweeper"),
        ],
        "hydra/launcher=joblib",
    ),
)
def test_a_missing_package_is_named(folder: Path, choice: str, package: str):
    program = "import hydra_plugins; hydra_plugins.__path__ = []; from runner.__main__ import command; command()"
    command = [sys.executable, "-c", program, "-m", choice, "seed=0,1", *QUIET]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert finished.returncode == 2 and finished.stdout == ""
    assert f"needs a package that is not installed; run pip install {package}" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1 and not (folder / "outputs").exists()


def test_checking_a_sweep_leaves_no_files(run_here: Any, folder: Path):
    finished = run_here("-m", "check", "model=mlp,gpt", "data=digits", "callbacks=none", code=2)
    assert "gpt" in finished.err and finished.err.count("error: ") == 1
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_a_job_that_another_process_trains_is_skipped(run_here: Any, folder: Path):
    assert run_here("-m", "seed=0,1", "+callbacks.own.ends=error", *QUIET).code == 1
    (sweep,) = sweeps(folder)
    imports = "import sys; from pathlib import Path; from runner.files.lock import lock_file"
    program = f"{imports}; lock = lock_file(Path(sys.argv[1])); print(1, flush=True); input()"
    command = [sys.executable, "-c", program, str(sweep / "seed1-mlp-digits" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "1\n"
            batches(folder)
            finished = run_here("-m", "seed=0,1", "+callbacks.own.ends=error", *QUIET)
            assert "skipped seed1-mlp-digits: another process is training it" in finished.out
            assert batches(folder) == []
        finally:
            other.communicate("\n", timeout=PATIENCE)
    assert run_here("-m", "seed=0,1", "+callbacks.own.ends=error", *QUIET).code == 0
    assert len(batches(folder)) == 2


def test_an_index_that_another_process_keeps_locked_is_an_error(
    run_here: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_folder, "PATIENCE", 0.3)
    (folder / "outputs" / "sweeps").mkdir(parents=True)
    index = folder / "outputs" / "sweeps" / run_folder.INDEX_LOCK
    lock = "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{lock}; print(1, flush=True); time.sleep(30)", str(index)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "1\n"
            finished = run_here("-m", "seed=0,1", *QUIET)
            assert finished.code and "another process has held it for 0.3 s; stop it" in finished.err
        finally:
            other.kill()
    assert batches(folder) == []


@pytest.mark.slow
def test_a_sweep_continues_with_truncated_records(run_here: Any, folder: Path):
    assert run_here("-m", "seed=0,1", *QUIET).code == 0
    (sweep,) = sweeps(folder)
    assert len(batches(folder)) > 0
    for content, file in ((b"", sweep / "sweep.json"), (b'{"id": "', sweep.parent.parent / run_folder.INDEX)):
        file.write_bytes(content)
        (sweep / "seed1-mlp-digits" / "result.json").write_bytes(content)
        run_here("-m", "seed=0,1", *QUIET, code=0)
        assert sweeps(folder) == [sweep] and batches(folder) == []
        assert statuses(sweep) == {"seed0-mlp-digits": "FINISHED", "seed1-mlp-digits": "FINISHED"}


@pytest.mark.slow
def test_folds_are_one_setting_with_different_evaluation_data(run_here: Any, folder: Path):
    finished = run_here("-m", "sweep=folds", "folds.count=3", "folds.stratified=true", *QUIET, code=0)
    assert "over 3 runs" in finished.out
    (sweep,) = sweeps(folder)
    evaluations = [json.loads(file.read_text())["evaluation"] for file in sorted(sweep.glob("*/result.json"))]
    assert [evaluation["eval:size"] for evaluation in evaluations] == ["599", "599", "599"]  # of 1,797 digits
    assert len({evaluation["eval:data"] for evaluation in evaluations}) == 3
    job = min(sweep.glob("*/result.json")).parent
    run_here("eval", str(job), code=0)  # as any other run
    (file,) = folder.glob("outputs/20*/*/result.json")
    assert json.loads(file.read_text())["evaluation"] == evaluations[0]


@pytest.mark.slow
def test_a_chosen_folder_holds_one_sweep(run_here: Any, folder: Path):
    command = ("-m", "hydra.sweep.dir=mine", *QUIET)
    assert run_here(*command, "seed=0,1").code == 0
    assert statuses(folder / "mine") == {"seed0-mlp-digits": "FINISHED", "seed1-mlp-digits": "FINISHED"}
    batches(folder)
    assert run_here(*command, "seed=0,1").code == 0 and batches(folder) == []
    assert "contains another sweep, sweep-seed-mlp-digits" in run_here(*command, "seed=0,2", code=2).err
    assert not (folder / "outputs").exists()


def test_a_single_run_writes_its_result(run_here: Any, folder: Path):
    assert run_here(*QUIET, "objective=loss", "run_name=mine").code == 0
    (file,) = folder.glob("outputs/20*/*/result.json")
    result = json.loads(file.read_text())
    assert (result["status"], result["name"], result["objective_name"]) == ("FINISHED", "mine", "eval/loss")
    assert result["objective"] == result["metrics"]["eval/loss"] > 0
    assert result["lower_is_better"] is True and result["seconds"] > 0
    assert {"eval/MulticlassAccuracy", "train/MulticlassAccuracy"} < result["metrics"].keys()


@pytest.mark.slow
def test_a_seeded_search_repeats_finished_jobs_and_continues(run_here: Any, folder: Path):
    command = ("-m", "sweep=optuna_tpe", "hydra.sweeper.sampler.n_startup_trials=2", *QUIET)
    assert run_here(*command, "hydra.sweeper.n_trials=4").code == 0
    (sweep,) = sweeps(folder)
    names = {path.parent.name for path in sweep.glob("*/result.json")}
    assert len(names) == 4 and len(batches(folder)) == 24
    worst = min(sweep.glob("*/result.json"), key=lambda path: json.loads(path.read_text())["objective"]).parent
    shutil.rmtree(worst)
    assert run_here(*command, "hydra.sweeper.n_trials=4", code=0).err == ""
    assert batches(folder) == six(worst.name)  # the search chose the same values, which depend on the objectives
    assert {path.parent.name for path in sweep.glob("*/result.json")} == names


@pytest.mark.slow
def test_a_search_continues_after_diverged_jobs(run_here: Any, folder: Path):
    search = ("sweep=optuna_tpe", "hydra.sweeper.n_trials=3", "hydra.sweeper.direction=minimize", "objective=loss")
    finished = run_here("-m", *search, "optimizer.lr=1e20,1e30", *QUIET, code=0)
    assert finished.out.count("DIVERGED") == 3


@pytest.mark.slow
def test_a_sweep_on_two_ranks_logs_two_runs_and_a_summary(folder: Path, run_app: Any):
    run_app("-m", "optimizer.lr=0.01,0.03", "launch.nproc_per_node=2", *LOGGED)
    (sweep,) = sweeps(folder)
    assert statuses(sweep) == {"lr0.01-mlp-digits": "FINISHED", "lr0.03-mlp-digits": "FINISHED"}
    assert list(folder.glob("outputs/20*")) == []
    runs = query(folder, "select name, status from runs order by name")
    assert runs == [(name, "FINISHED") for name in ("lr0.01-mlp-digits", "lr0.03-mlp-digits", "sweep-lr-mlp-digits")]
    points = query(folder, "select run_uuid, step from metrics where key = 'loss/train/total'")
    assert len(points) == 12 == len({*points})
    tags = query(folder, "select t.value, r.name from tags t join runs r using (run_uuid) where t.key = 'runner.sweep'")
    assert {name for _, name in tags} == {"sweep-lr-mlp-digits", "lr0.01-mlp-digits", "lr0.03-mlp-digits"}
    assert len({sweep_id for sweep_id, _ in tags}) == 1
    jobs = query(folder, "select value from tags where key in ('runner.job', 'runner.sweep_summary') order by value")
    assert jobs == [("0",), ("1",), ("true",)]
    ((overrides,), _) = query(folder, "select value from tags where key = 'runner.overrides' order by value")
    assert overrides.startswith("optimizer.lr=0.01 launch.nproc_per_node=2 model=mlp")


@pytest.mark.slow
def test_failures_of_submitit_jobs_are_printed_at_the_end(folder: Path, run_app: Any):
    finished = run_app(
        "-m", "hydra/launcher=submitit_local", "seed=0,1", "+callbacks.own.ends=error", *QUIET, exit_code=1
    )
    assert finished.stderr.count("RuntimeError: a callback that fails") == 1
    assert "1 finished, 1 failed" in finished.stdout
