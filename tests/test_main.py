"""The application as a user meets it: what a command leaves behind, what it says, how it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

SHORT = ("trainer.max_duration=2ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")  # 6 batches
STEPS = list(range(1, 7))

OWN = '''
"""What a user wrote."""
import resource

from torch import nn

from runner import Callback, ClassificationModel


class Failing(Callback):
    def batch_start(self, state, logger):
        raise RuntimeError("a callback that fails")


class FullDisk(Callback):
    def fit_start(self, state, logger):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class NoFolder(Callback):
    def fit_start(self, state, logger):
        (state.run_dir / "checkpoints").write_text("in the way of the folder")


class Greeter(Callback):
    def __init__(self, word: str = "hello") -> None:
        self.word = word

    def fit_start(self, state, logger):
        print(self.word, type(state.unwrapped_model).__name__)


class OwnModel(ClassificationModel):
    def __init__(self, units: int = 4) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.ReLU(), nn.Linear(units, 10)), 10)


class Broken:
    def __init__(self) -> None:
        None + 1


class Net(nn.Linear):
    def __init__(self, units: int = 4) -> None:
        super().__init__(64, units)


class Lost:
    def __init__(self) -> None:
        {}["key"]


def load_lost() -> None:
    {}["train"]
'''


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its schema, whose making takes seconds: tests that do not ask for a new one have a copy."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    make = f"from mlflow import MlflowClient; MlflowClient('sqlite:///{path}').get_experiment_by_name('x')"
    subprocess.run([sys.executable, "-c", make], check=True, capture_output=True, timeout=60)
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> Path:
    """A working directory with an empty store and the user's `own.py`."""
    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_store, tmp_path / "outputs" / "mlflow.db")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def query(folder: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Rows of the store in a working directory."""
    with contextlib.closing(sqlite3.connect(folder / "outputs" / "mlflow.db", timeout=30)) as connection:
        return connection.execute(sql, values).fetchall()


def run_folders(folder: Path, base: str = "outputs/20*/*") -> list[Path]:
    return sorted(folder.glob(base))


def artifacts(folder: Path) -> set[str]:
    """Paths of all artifacts, without experiment and run."""
    (root,) = (folder / "outputs" / "mlartifacts").glob("*/artifacts")
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# What is wrong, and what the message must hold: the fault as typed, and what to write in its place.
WRONG: dict[str, tuple[str, ...]] = {
    # words that are in another place
    "speed_monitor": ("speed_monitor", "+callbacks=speed_monitor"),
    "+algorithms=speed_monitor": ("algorithms=speed_monitor", "+callbacks=speed_monitor"),
    "+callbacks=mixup": ("callbacks=mixup", "+algorithms=mixup"),
    "batch_size=4": ("batch_size", "data.batch_size"),
    # groups and choices
    "modle=mlp": ("modle", "did you mean 'model'"),
    "model=mpl": ("model=mpl", "did you mean 'mlp'"),
    "model=": ("model=", "gpt, mlp, resnet8"),
    "model=null": ("model=null", "gpt, mlp, resnet8"),
    "scheduler=cosine": ("scheduler=cosine", "did you mean 'cosine_annealing'"),
    "trainer=fast": ("trainer=fast", "default"),
    "experiment=digits_plan": ("experiment=digits_plan", "did you mean 'digits_plain'"),
    "callbacks=speedmonitor": ("callbacks=speedmonitor", "did you mean 'speed_monitor'"),
    "+callbacks=speed_monitr": ("callbacks=speed_monitr", "did you mean 'speed_monitor'"),
    "+algorithms=mixupp": ("algorithms=mixupp", "did you mean 'mixup'"),
    "callbacks=null": ("callbacks=null", "none"),
    "algorithms=null": ("algorithms=null", "none"),
    "callbacks=progress_bar,lr_monitor": ("callbacks=progress_bar,lr_monitor", "[progress_bar,lr_monitor]"),
    "hydra/launcher=slurm": ("hydra/launcher=slurm", "basic"),
    "+model=mlp": ("+model", "model=", "without the +"),
    "~data": ("data=None", "conf/data/"),
    "~optimizer": ("optimizer=None", "conf/optimizer/"),
    "~seed": ("seed",),
    # keys
    "optimizer.lrr=1": ("optimizer.lrr", "did you mean 'lr'"),
    "optimizer=adam optimizer.momentum=0.9": ("optimizer.momentum", "betas"),
    "experiment=digits_plain optimizer=adamw": ("experiment=digits_plain", "~optimizer.momentum ~optimizer.nesterov"),
    "trainer.max_durations=1ep": ("trainer.max_durations", "did you mean 'max_duration'"),
    "+trainer.typo=1": ("trainer.typo", "runner.Trainer has no such argument"),
    "++trainer.maxduration=1ep": ("trainer.maxduration", "did you mean 'max_duration'"),
    "+trainer.train_dataloader=1": ("trainer.train_dataloader", "other groups"),
    "+trainer.max_duration=2ep": ("+trainer.max_duration", "without the +"),
    "seed.x=1": ("seed.x", "single value"),
    "callbacks.speed_monitor.window_size=3": ("callbacks.speed_monitor.window_size", "+callbacks=speed_monitor"),
    "~callbacks.speed_monitor": ("callbacks.speed_monitor", "not part of this run"),
    "mode.x=1": ("mode.x", "mode is a single value"),
    "model.module.widht=4": ("model.module.widht", "did you mean 'width'"),
    # classes
    "+callbacks.mine=3": ("callbacks.mine=3", "_target_"),
    "callbacks.mlflow_logger=null": ("callbacks.mlflow_logger=None", "~callbacks."),
    "+callbacks.mine._target_=nowhere.Mine": ("callbacks.mine._target_='nowhere.Mine'", "no module 'nowhere'"),
    "+callbacks.mine._target_=callbacks.SpeedMonitr": ("_target_='callbacks.SpeedMonitr'", "'SpeedMonitor'"),
    "+callbacks.mine._target_=own.Greter": ("_target_='own.Greter'", "did you mean 'Greeter'"),
    "+callbacks.mine._target_=needy.Mine": ("_target_='needy.Mine'", "package 'not_installed_at_all'"),
    "+callbacks.mine._target_=torn.Mine": ("_target_='torn.Mine'", "SyntaxError"),
    "+callbacks.mine._target_=os.sep": ("_target_='os.sep'", "is a str"),
    "+callbacks.mine._target_=own.Greeter +callbacks.mine.wrod=hi": ("callbacks.mine.wrod", "did you mean 'word'"),
    "+callbacks.mine._target_=own.Broken": ("callbacks.mine", "own.Broken", "NoneType", "own.py:"),
    "+callbacks.mine._target_=own.Lost": ("callbacks.mine: KeyError: 'key' (own.Lost)", "own.py:", "HYDRA_FULL_ERROR"),
    "~model.module +model.module._target_=own.Net +model.module.units=-3": ("model.module: RuntimeError: ", "own.py:"),
    "~data +data._target_=own.load_lost": ("data: KeyError: 'train' (own.load_lost)", "own.py:"),
    "model._target_=3": ("model._target_=3",),
    "model._target_=runner.models.ResNet8": ("model.module", "runner.models.ResNet8 has no such argument"),
    "optimizer._target_=torch.optim.SDG": ("torch.optim.SDG", "did you mean 'SGD'"),
    "data._target_=runner.data.digits.load_digts": ("load_digts", "did you mean 'load_digits'"),
    # types and values
    "seed=one": ("seed='one'", "whole number"),
    "seed=-1": ("seed=-1", "at least 0"),
    "run_name=[1,2]": ("run_name=[1, 2]", "name"),
    "optimizer.lr=fast": ("optimizer.lr='fast'", "float"),
    "optimizer.lr=-1": ("optimizer", "learning rate", "-1"),
    "optimizer.nesterov=maybe": ("optimizer.nesterov='maybe'", "bool"),
    "optimizer=adam optimizer.betas=3": ("optimizer.betas=3", "tuple"),
    "model.module.width=wide": ("model.module.width='wide'", "int"),
    "model.module.width=0": ("model.module.width=0", "at least 1"),
    "model=mlp model.module.hidden=[-3]": ("error: model.module.hidden=[-3]", "at least 1"),
    "data.batch_size=0": ("data.batch_size=0", "at least 1"),
    "data.batch_size=-5": ("data.batch_size=-5", "at least 1"),
    "trainer.load_strict=perhaps": ("trainer.load_strict='perhaps'", "bool"),
    "trainer.precision=fp64": ("trainer.precision='fp64'", "did you mean 'fp32'"),
    "trainer.device=gpu": ("trainer.device='gpu'", "'cuda'"),
    "trainer.device=cuda:99": ("trainer.device='cuda:99'", "'cpu'"),
    "trainer.grad_accum=0": ("trainer.grad_accum=0", "at least 1"),
    "trainer.microbatch_size=-3": ("trainer.microbatch_size=-3", "'auto'"),
    "trainer.scale_schedule_ratio=-1": ("trainer.scale_schedule_ratio=-1", "above 0"),
    "+callbacks=speed_monitor callbacks.speed_monitor.window_size=0": ("speed_monitor.window_size=0", "at least 1"),
    "algorithms.batch_augment.pad=-1": ("algorithms.batch_augment.pad=-1", "at least 0"),
    "callbacks.mlflow_logger.close_timeout=-1": ("callbacks.mlflow_logger.close_timeout=-1", "0 or more"),
    "callbacks.checkpoint_saver.monitor=nothing": ("callbacks.checkpoint_saver.monitor='nothing'", "'eval/loss'"),
    # times
    "trainer.max_duration=5epochs": ("trainer.max_duration='5epochs'", "'5ep'"),
    "trainer.max_duration=1.5ep": ("trainer.max_duration='1.5ep'", "'2ep'"),
    "trainer.max_duration=-1ep": ("trainer.max_duration='-1ep'", "'1ep'"),
    "trainer.max_duration=0.5dur": ("trainer.max_duration='0.5dur'", "more than 0"),
    "trainer.max_duration=null": ("trainer.max_duration=None", "'10ep'"),
    "trainer.eval_interval=weekly": ("trainer.eval_interval='weekly'", "'10ep'"),
    "trainer.eval_interval=-1": ("trainer.eval_interval='-1ep'",),
    "callbacks.checkpoint_saver.save_interval=2x": ("callbacks.checkpoint_saver.save_interval='2x'",),
    "trainer.max_duration=${oops}": ("trainer.max_duration", "oops"),
    # what does not go together
    "trainer.grad_accum=2 trainer.microbatch_size=4": ("grad_accum=2", "microbatch_size=4", "exclude"),
    "optimizer.momentum=0": ("optimizer", "Nesterov", "momentum"),
    "trainer.max_duration=1ep scheduler.t_warmup=2ep": ("scheduler.t_warmup='2ep'", "t_max='1dur'"),
    "trainer.max_duration=100tok": ("max_duration='100tok'", "num_tokens"),
    # paths
    "resume=missing": ("resume='missing'", "no such folder"),
    "resume=outputs": ("resume='outputs'", "no complete checkpoint"),
    "resume=latest": ("resume='latest'", "no run in outputs/ has written a checkpoint"),
    "resume_allow=3": ("resume_allow=3", "a list of keys"),
    "trainer.load_path=missing": ("trainer.load_path='missing'", "no such folder"),
    "hydra.run.dir=/proc/none": ("cannot use '/proc/none'",),
    "hydra.run.dir=own.py/run": ("cannot use", "own.py"),
    "--config-dir=missing": ("missing", "not found"),
    "--config-name=nothing": ("'nothing'",),
    "rerun=missing": ("rerun='missing'", "no such folder"),
    "rerun=outputs": ("rerun='outputs'", "no record"),
    "mode=sync resume=missing": ("resume=", "missing", "nothing was logged to MLflow"),
    # modes
    "mode=chek": ("mode='chek'", "did you mean 'check'"),
    "~mode": ("'mode' not found",),
    "mode=eval": ("mode=eval", "resume=<run folder"),
    "mode=predict": ("mode=predict", "trainer.load_path"),
    "mode=explain explain.format=yaml": ("explain.format='yaml'", "json, table"),
    "explain.fromat=json": ("explain.fromat", "did you mean 'format'"),
    "+explain.width=80": ("explain.width", "nobody reads it"),
    "explain=json": ("explain='json'", "explain.format=..."),
    "predict.format=csv": ("predict.format='csv'", "parquet, pt"),
    "predict.split=test": ("predict.split='test'", "eval, train"),
    "mode=check model=gpt": ("model=gpt does not fit data=digits",),
    "objective=eval/acuracy": ("objective='eval/acuracy'", "did you mean 'eval/MulticlassAccuracy'"),
    "allow_targets=3": ("allow_targets=3", "a list of classes"),
    "skip_finished=maybe": ("skip_finished='maybe'", "true or false"),
    "scheduler=none +scheduler.t_max=1ep": ("scheduler.t_max", "nobody reads it"),
    "rerun=a resume=b": ("resume= and rerun=", "give one"),
    # processes and sweeps
    "launch.nproc_per_node=0": ("launch.nproc_per_node=0", "at least 1"),
    "launch.nproc_per_node=two": ("launch.nproc_per_node='two'", "'auto'"),
    "launch.nproc_per_node=1.5": ("launch.nproc_per_node=1.5",),
    "launch.threads=0": ("launch.threads=0", "at least 1"),
    "launch.nproc=2": ("launch.nproc", "did you mean 'nproc_per_node'"),
    "launch.nproc_per_node=100000": ("launch.nproc_per_node=100000", "at most"),
    "launch=fast": ("launch=fast", "default"),
    "~launch": ("launch=None", "conf/launch/"),
    "sweep=seeds": ("sweep=seeds", "add -m"),
    "-m sweep=seds": ("sweep=seds", "did you mean 'seeds'"),
    "hydra/launcher=joblib": ("hydra/launcher=joblib", "add -m"),
    "-m hydra/launcher=jobllib seed=0,1": ("hydra/launcher=jobllib", "did you mean 'joblib'"),
    "-m hydra/sweeper=optun seed=0,1": ("hydra/sweeper=optun", "did you mean 'optuna'"),
    "seed=0,1": ("seed=0,1", "add -m"),
    "-m hydra/launcher=submitit_slurm seed=0,1": ("the sweep cannot begin", "srun"),
    "-m optimizer.lr=0.1,x": ("optimizer.lr='x'", "float"),
    "-m optimizer.lrr=0.1,0.2": ("optimizer.lrr", "did you mean 'lr'"),
    "-m ~data +data._target_=own.load_lost data.batch_size=3 seed=0,1": ("data.batch_size", "+data.batch_size=..."),
    "-m optimizer.momentum=0.9,0 seed=0,1": ("optimizer: Nesterov", "in the job optimizer.momentum=0 seed=0"),
    "-m resume=outputs seed=0,1": ("resume='outputs'", "no complete checkpoint"),
    # grammar
    "nonsense": ("nonsense", "key=value"),
    "=3": ("=3", "key=value"),
    "+callbacks=[speed_monitor": ("+callbacks=[speed_monitor", "'+callbacks=[a,b]'"),
    "--seed=1": ("--seed=1", "seed=..."),
    "--mutlirun": ("--mutlirun", "--multirun"),
    "-m seed=": ("seed=''", "whole number"),
}


def test_there_are_sixty_wrong_commands():
    assert len(WRONG) >= 60


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_one_message_and_leaves_nothing(command: str, run_here: Any, folder: Path):
    (folder / "needy.py").write_text("import not_installed_at_all\n")
    (folder / "torn.py").write_text("class Mine(:\n")
    before = sorted(folder.rglob("*"))
    code, out, err = run_here(*command.split())
    assert code == 2, err
    assert out == ""
    lines = err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert len(lines) <= 6 and "Traceback" not in err, err
    for part in WRONG[command]:
        assert part in err, err
    # The lock beside a store stays, when the writer that was started early has already opened it.
    passing = ("__pycache__", "mlflow.db.lock")
    left = {path for path in folder.rglob("*") if not {*passing} & {*path.parts}} - {*before}
    assert left == set()
    assert query(folder, "select count(*) from runs") == [(0,)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("data=digit",),
        ("optimizer.lrr=1",),
        ("callbacks=null",),
        ("--lr", "0.1"),
        ("resume=missing", "seed=x"),
        ("-m", "model=mlp,mpl"),
        ("trainer.max_duration=5epochs", "callbacks=none"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_ends_a_process_with_2(run_app: Any, tmp_path: Path, arguments: tuple[str, ...]):
    done = run_app(*arguments, exit_code=2)
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1 and len(done.stderr.splitlines()) <= 2, done.stderr
    assert run_folders(tmp_path) == run_folders(tmp_path, "outputs/**/[0-9]*") == []
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_help_and_the_config_are_quick(tmp_path: Path):
    slow = {"torch", "mlflow", "torchmetrics", "matplotlib", "sklearn", "pandas", "rich", "numpy"}
    program = f"""
import sys
from runner.__main__ import main
for command in (["--help"], ["--cfg", "job"], ["optimizer.lrr=1"], ["model=mpl"], ["callbacks=null"]):
    sys.argv = ["runner", *command]
    print("exit", main())
print("imported", sorted({slow!r} & set(sys.modules)))
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert time.monotonic() - start < 20
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("exit ")] == ["exit 0", "exit 0", "exit 2", "exit 2", "exit 2"]
    assert lines[-1] == "imported []"
    assert "callbacks: activation_monitor, checkpoint_saver, console_summary" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_who_reads_no_more_ends_it_quietly(tmp_path: Path):
    command = f"{sys.executable} -m runner --help | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The main job from a new folder, with its output; nothing is there before, the store included."""
    folder = tmp_path_factory.mktemp("story")
    command = [sys.executable, "-m", "runner", *SHORT, "+callbacks=lr_monitor"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_is_in_mlflow(story: Any):
    folder, _ = story
    (run_dir,) = run_folders(folder)
    name = f"mlp-digits-{run_dir.parent.name}-{run_dir.name}"
    assert query(folder, "select status, name from runs") == [("FINISHED", name)]
    assert query(folder, "select name from experiments where experiment_id > 0") == [("runner",)]
    parameters = dict(query(folder, "select key, value from params"))
    assert parameters["optimizer.lr"] == "0.1"
    assert parameters["model.module.hidden"] == "[128, 128]"
    assert parameters["trainer.max_duration"] == "2ep"

    def points(key: str) -> list[tuple[int, float]]:
        return query(folder, "select step, value from metrics where key = ? order by step", key)

    losses = points("loss/train/total")
    assert [step for step, _ in losses] == STEPS
    assert losses[0][1] > losses[-1][1] > 0
    assert [step for step, _ in points("lr-SGD/group0")] == STEPS
    for key in ("metrics/train/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy", "loss/eval/total"):
        assert [step for step, _ in points(key)] == [3, 6], key
    assert {"record/config.yaml", "record/overrides.yaml", "record/environment.json"} <= artifacts(folder)
    assert any(path.endswith("learning_curves.png") for path in artifacts(folder))


def test_a_run_is_in_its_folder(story: Any):
    folder, _ = story
    (run_dir,) = run_folders(folder)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 400
    assert "experiment" not in config and "hydra" not in config
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text()) == [*SHORT, "+callbacks=lr_monitor"]
    assert (run_dir / "learning_curves.png").stat().st_size > 1000
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"ep1-ba3", "ep2-ba6", "latest"}
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep2-ba6"
    assert {path.name for path in folder.iterdir()} == {"outputs"}


def test_the_last_lines_say_where_it_lies_and_how_to_look_at_it(story: Any):
    folder, done = story
    (run_dir,) = run_folders(folder)
    assert all(line.startswith("sending to MLflow: ") for line in done.stderr.splitlines())
    where, how = done.stdout.splitlines()[-2:]
    assert where.split() == ["run", str(run_dir.relative_to(folder))]
    assert how.split(maxsplit=1)[1].strip() == "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db"


def test_resume_goes_on_in_the_same_folder_and_the_same_mlflow_run(story: Any, tmp_path: Path, run_app: Any):
    shutil.copytree(story[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    (run_dir,) = run_folders(tmp_path)
    database = tmp_path / "outputs" / "mlflow.db"
    with contextlib.closing(sqlite3.connect(database)) as store:  # the story's run, moved with its folder
        for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
            store.execute(f"update {table} set {column} = replace({column}, ?, ?)", (str(story[0]), str(tmp_path)))
        store.commit()
    for file in (run_dir / "mlflow").glob("*.json*"):
        file.write_text(file.read_text().replace(str(story[0]), str(tmp_path)))
    before = query(tmp_path, "select run_uuid, name from runs")

    # A run that is refused changes nothing of what was finished.
    refused = run_app(f"resume={run_dir.relative_to(tmp_path)}", exit_code=2)
    assert "max_duration='2ep' is reached" in refused.stderr
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]

    # Everything but what is given again is as the run was started: model, data, callbacks.
    run_app(f"resume={run_dir.relative_to(tmp_path)}", "trainer.max_duration=3ep")
    assert run_folders(tmp_path) == [run_dir]
    assert query(tmp_path, "select run_uuid, name from runs") == before
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    for key in ("loss/train/total", "lr-SGD/group0"):
        rows = query(tmp_path, "select step from metrics where key = ? order by step", key)
        assert [step for (step,) in rows] == list(range(1, 10))
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 400 and config["trainer"]["max_duration"] == "3ep"


def test_a_sweep_is_one_folder_and_one_run_a_job(folder: Path, run_app: Any):
    run_app("-m", "seed=0,1", *SHORT, "~callbacks.learning_curves")
    (sweep,) = run_folders(folder, "outputs/sweeps/*/*")
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"digits-seed0", "digits-seed1", "mlflow"}
    names = query(folder, "select name, status from runs order by name")
    assert names == [(name, "FINISHED") for name in ("digits-seed-sweep", "digits-seed0", "digits-seed1")]
    assert {value for (value,) in query(folder, "select value from params where key = 'seed'")} == {"0", "1"}
    seeds = [yaml.safe_load((sweep / f"digits-seed{seed}" / "config.yaml").read_text())["seed"] for seed in (0, 1)]
    assert seeds == [0, 1]
    final = query(folder, "select value from metrics where key = 'loss/train/total' and step = 6")
    assert len({value for (value,) in final}) == 2
    assert run_folders(folder) == []


def test_a_failure_in_training_is_a_trace_and_exit_code_1(folder: Path, run_app: Any):
    done = run_app(*SHORT, "+callbacks.mine._target_=own.Failing", exit_code=1)
    assert "Traceback" in done.stderr
    assert "RuntimeError: a callback that fails" in done.stderr
    assert "raised by 'mine' at BATCH_START, epoch 0, batch 0 (0 in epoch)" in done.stderr
    assert "failed" in done.stdout
    assert query(folder, "select status from runs") == [("FAILED",)]
    (trace,) = (folder / "outputs" / "mlartifacts").rglob("error.txt")
    assert "a callback that fails" in trace.read_text()
    (run_dir,) = run_folders(folder)
    assert (run_dir / "config.yaml").exists()


def test_neither_mlflow_nor_a_full_disk_ends_training_but_a_lost_end_is_a_failure(folder: Path, run_app: Any):
    done = run_app(
        *(*SHORT, "+callbacks.full._target_=own.FullDisk", "callbacks.mlflow_logger.tracking_uri=nosuch://store"),
        "model.module.hidden=[1000]",
        exit_code=1,
    )
    (run_dir,) = run_folders(folder)
    assert "WARNING: MLflow: " in done.stderr and "nosuch" in done.stderr
    assert done.stderr.count("WARNING: MLflow: ") == 1
    assert done.stderr.count("WARNING: checkpoint ") == 1 and "epoch 2/2" in done.stdout
    assert "OSError: the run's last checkpoint was not written: make room, then resume\n" in done.stderr
    assert not (run_dir / "checkpoints").exists() or list((run_dir / "checkpoints").iterdir()) == []
    assert list(run_dir.rglob("*.tmp")) == []
    assert query(folder, "select count(*) from runs") == [(0,)]


def test_a_folder_that_cannot_be_written_at_the_end_is_a_failure(folder: Path, run_here: Any):
    code, out, err = run_here(*SHORT, "+callbacks.mine._target_=own.NoFolder")
    assert code == 1 and "epoch 2/2" in out
    assert "OSError: the run's last checkpoint was not written: make room, then resume\n" in err
    assert query(folder, "select status from runs") == [("FAILED",)]


def test_own_classes_and_own_configs(folder: Path, run_here: Any):
    """From the working directory and `--config-dir`, where a group takes more files."""
    for path, text in {
        "more/model/own.yaml": "_target_: own.OwnModel\nunits: 8\n",
        "more/callbacks/greeter.yaml": "greeter:\n  _target_: own.Greeter\n  word: welcome\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    code, out, err = run_here(
        *("--config-dir=more", "model=own", "data.batch_size=400", "trainer.max_duration=1ba"),
        *("+callbacks=greeter", "+callbacks.second._target_=own.Greeter", "~callbacks.mlflow_logger"),
    )
    assert code == 0, err
    assert err == ""
    assert "welcome OwnModel" in out and "hello OwnModel" in out
    (run_dir,) = run_folders(folder)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["model"] == {"_target_": "own.OwnModel", "units": 8}
    for config_dir in (["--config-dir=more"], ["--config-dir", "more"]):
        given = [*config_dir, "model=own", "+callbacks=greeter"]
        unknown = run_here(*given, "callbacks.greeter.wrod=hi", code=2).err
        assert unknown == "error: callbacks.greeter.wrod: callbacks.greeter has no key 'wrod'; did you mean 'word'?" + (
            " Allowed: word\n"
        )
        assert "model has no key 'unit'; did you mean 'units'" in run_here(*given, "model.unit=4", code=2).err


def test_a_run_of_nothing_but_training(folder: Path, run_here: Any):
    code, out, err = run_here(*SHORT, "callbacks=none", "algorithms=none", "scheduler=none")
    assert (code, out, err) == (0, "", "")
    (run_dir,) = run_folders(folder)
    assert {path.name for path in run_dir.iterdir()} >= {"config.yaml", "overrides.yaml", "environment.json"}
    assert query(folder, "select count(*) from runs") == [(0,)]


def test_what_takes_the_place_of_the_defaults_is_said(folder: Path, run_here: Any):
    _, out, err = run_here("callbacks=speed_monitor", "mode=explain", code=0)
    (line,) = err.splitlines()
    assert line.startswith("WARNING: callbacks=speed_monitor replaces mlflow_logger, checkpoint_saver, ")
    assert line.endswith("; +callbacks=speed_monitor adds to them") and "speed_monitor" in out


def test_a_folder_of_one_s_own_that_holds_something_is_never_removed(folder: Path, run_here: Any):
    (folder / "kept").mkdir()
    (folder / "kept" / "notes.txt").write_text("mine")
    assert run_here("hydra.run.dir=kept", "callbacks.checkpoint_saver.monitor=nothing").code == 2
    assert (folder / "kept" / "notes.txt").read_text() == "mine"


def test_a_working_directory_that_cannot_be_written_is_named(tmp_path: Path, run_app: Any):
    (tmp_path / "outputs").write_text("a file where the folder should be")
    done = run_app(exit_code=2)
    assert done.stderr.startswith("error: hydra.run.dir: ") and f"'{tmp_path}/outputs" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_holds_another_run_is_refused(folder: Path, run_here: Any):
    arguments = (*SHORT, "hydra.run.dir=runs/a", "~callbacks.mlflow_logger")
    assert run_here(*arguments).code == 0
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    code, _, err = run_here(*arguments, "optimizer.lr=0.2")
    assert code == 2
    assert "runs/a/checkpoints" in err and "resume" in err
    after = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    assert after == before and any(path.name == "config.yaml" for path in after)


@pytest.mark.parametrize("package", ["callbacks", "algorithms"])
def test_a_package_that_hides_one_of_ours_is_named(tmp_path: Path, run_app: Any, package: str):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    done = run_app(exit_code=2)
    assert done.stderr.startswith(f"error: package {package!r} is found at {tmp_path}")
    assert "Rename" in done.stderr and len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {package}


def test_the_trace_of_a_wrong_configuration_is_there_for_the_asking(folder: Path, run_here: Any, monkeypatch: Any):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    code, _, err = run_here("+callbacks.mine._target_=own.Broken")
    assert code == 2
    assert "None + 1" in err and err.splitlines()[-1].startswith("error: callbacks.mine")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
