"""Configs and saved runs in Python: `Trainer.from_config` and `runner.load`."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.utils import JobRuntime
from main_runs import run_folders

import runner
from runner import Callback, ClassificationModel, Logger, State, Trainer
from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_file
from runner.config.composing import VERSION_BASE
from runner.failures.errors import WrongConfig

SHORT = ("model=mlp", "trainer.max_duration=6ba", "callbacks=checkpoint_saver")
OWN = "taught_here"


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name this file as a module outside of `tests`, because a run records all files of the packages that it uses."""
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(folder), "model.pt")


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_trainer_from_a_config_trains_like_the_command(folder: Path, run_here: Any):
    run_here(*SHORT, "+algorithms=ema", code=0)
    (by_command,) = run_folders(folder)
    with Trainer.from_config(*SHORT, "+algorithms=ema") as trainer:
        result = trainer.fit()
    assert result.run_dir in run_folders(folder) and result.run_dir != by_command
    assert trainer.state.run_name.startswith(f"{result.run_dir.name}-mlp-digits-")
    assert_equal(weights_of(by_command), weights_of(result.run_dir))
    record = [(run / "config.yaml").read_text() for run in (by_command, result.run_dir)]
    assert record[0] == record[1]
    results = [json.loads((run / "result.json").read_text()) for run in (by_command, result.run_dir)]
    for key in ("status", "identity", "metrics", "objective", "objective_name"):
        assert results[0][key] == results[1][key], key


def test_a_diverged_fit_is_reported_once_in_python_and_by_a_command(
    folder: Path, run_here: Any, capfd: pytest.CaptureFixture[str]
):
    diverges = (*SHORT, "optimizer.lr=1e30")
    assert run_here(*diverges, code=3).err.count("the loss of the last batch is nan") == 1
    with Trainer.from_config(*diverges) as trainer:
        trainer.fit()
    assert capfd.readouterr().err.count("the loss of the last batch is nan: ") == 1


class Fails(Callback):
    def __init__(self, error: str) -> None:
        self.error = error

    def batch_end(self, state: State, logger: Logger) -> None:
        raise {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[self.error]("on purpose")


@pytest.mark.parametrize(
    ("error", "status"),
    [("RuntimeError", "FAILED"), pytest.param("KeyboardInterrupt", "KILLED", marks=pytest.mark.slow)],
)
def test_a_fit_that_fails_records_its_status(folder: Path, error: str, status: str):
    fails = f"+callbacks.fails={{_target_: {OWN}.Fails, error: {error}}}"
    with pytest.raises(BaseException, match="on purpose"), Trainer.from_config(*SHORT, fails) as trainer:
        assert not (trainer.state.run_dir / "result.json").exists()
        trainer.fit()
    assert json.loads((run_folders(folder)[0] / "result.json").read_text())["status"] == status


def test_a_run_made_in_python_can_be_resumed_and_loaded(folder: Path, run_here: Any):
    with Trainer.from_config(*SHORT, "+algorithms=[blurpool,ema]", "model=resnet8") as trainer:
        trainer.fit()
    run_here("resume", "latest", "trainer.max_duration=8ba", code=0)
    before = torch.get_rng_state()
    loaded = runner.load("latest")
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.config["model"]["module"]["_target_"] == "runner.models.ResNet8"
    assert loaded.checkpoint == find_checkpoint(trainer.state.run_dir) and loaded.checkpoint.name.endswith("ba8")
    assert not loaded.model.training
    assert_equal(dict(loaded.model.state_dict()), weights_of(trainer.state.run_dir))  # with the layers of BlurPool
    assert_equal(dict(runner.load(loaded.checkpoint).model.state_dict()), dict(loaded.model.state_dict()))


class Teacher(Callback):
    """Loads another run in two threads, and applies it to each batch."""

    def __init__(self, run: str) -> None:
        self.run = run

    def fit_start(self, state: State, logger: Logger) -> None:
        with ThreadPoolExecutor(2) as pool:
            self.model, other = (saved.model for saved in pool.map(runner.load, [self.run, self.run]))
        assert_equal(dict(self.model.state_dict()), dict(other.state_dict()))

    def batch_end(self, state: State, logger: Logger) -> None:
        self.model(state.batch)


class Student(ClassificationModel):
    """Loads its teacher when it is made."""

    def __init__(self, run: str) -> None:
        super().__init__(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), num_classes=10)
        self.__dict__["teacher"] = runner.load(run).model  # no submodule of this model


def test_loading_a_teacher_does_not_change_training(folder: Path, run_here: Any):
    run_here(*SHORT, "hydra.run.dir=teacher", code=0)
    run_here(*SHORT, "seed=1", code=0)
    (alone,) = run_folders(folder)
    run_here(*SHORT, "seed=1", f"+callbacks.teacher={{_target_: {OWN}.Teacher, run: teacher}}", code=0)
    (taught,) = {*run_folders(folder)} - {alone}
    assert_equal(weights_of(alone), weights_of(taught))


@pytest.mark.slow
def test_models_in_the_jobs_of_a_sweep_load_their_teacher(folder: Path, run_here: Any):
    run_here(*SHORT, "hydra.run.dir=teacher", code=0)
    model = ("~model", f"+model={{_target_: {OWN}.Student, run: teacher}}", *SHORT[1:])
    assert "2 finished" in run_here("-m", "seed=0,1", *model, code=0).out


@pytest.mark.slow
def test_two_ranks_can_load_a_teacher(folder: Path, run_here: Any):
    run_here(*SHORT, "hydra.run.dir=teacher", code=0)
    teacher = f"+callbacks.teacher={{_target_: {__name__}.Teacher, run: teacher}}"
    run_here(*SHORT, "launch.nproc_per_node=2", teacher, code=0)


def test_loading_leaves_the_hydra_of_another_program_alone(folder: Path):
    with Trainer.from_config(*SHORT, "callbacks=none") as trainer:
        trainer.fit()
        trainer.save_checkpoint(trainer.state.run_dir / "checkpoints" / "last")
    (folder / "app").mkdir()
    (folder / "app" / "main.yaml").write_text("rate: 0.1\n")
    with hydra.initialize_config_dir(str(folder / "app"), job_name="mine", version_base=VERSION_BASE):
        runner.load(str(trainer.state.run_dir))
        assert hydra.compose("main", ["rate=0.2"]) == {"rate": 0.2}
        assert JobRuntime.instance().get("name") == "mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer.lrr=0.1",), "optimizer.lrr: optimizer has no key 'lrr'; did you mean 'lr'?"),
        (("model=mpl",), "did you mean 'mlp'"),
        (("mode=check",), "mode=check: a command begins with a verb; write runner check"),
        (("resume=latest",), "resume=latest: a command begins with a verb; write runner resume latest"),
        (("launch.nproc_per_node=2",), "launch.nproc_per_node: a program cannot start more ranks"),
        (("data.batch_size=0",), "data.batch_size=0"),
    ],
)
def test_a_wrong_config_is_one_message_and_leaves_nothing(folder: Path, overrides: tuple[str, ...], message: str):
    with pytest.raises(WrongConfig) as raised:
        Trainer.from_config("callbacks=none", *overrides)
    assert message in str(raised.value)
    assert run_folders(folder) == []


def test_from_config_refuses_a_config_dir_that_does_not_exist(folder: Path):
    with pytest.raises(WrongConfig, match="^--config-dir='.*/missing': no such folder$"):
        Trainer.from_config(config_dir="missing")
    assert run_folders(folder) == []


def test_from_config_reads_a_config_dir(folder: Path):
    (folder / "mine" / "model").mkdir(parents=True)
    small = "_target_: runner.ClassificationModel\nnum_classes: 10\nmodule:\n  _target_: runner.models.MLP\n"
    small += "  in_features: 64\n  hidden: [4]\n  num_classes: 10\n"
    (folder / "mine" / "model" / "small.yaml").write_text(small)
    with Trainer.from_config("model=small", "callbacks=none", config_dir="mine") as trainer:
        assert "of 310 parameters" in repr(trainer)
    assert (trainer.state.run_dir / "overrides.yaml").read_text().startswith("- --config-dir=mine")


def test_a_run_that_cannot_be_loaded_says_why(folder: Path):
    with pytest.raises(ValueError, match="run='missing': .*no record"):
        runner.load("missing")
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        runner.load("empty")


@pytest.mark.slow
def test_ranks_of_torchrun_make_one_run(folder: Path, run_ranks: Any):
    def program():
        from runner import Trainer

        overrides = ("model=mlp", "trainer.max_duration=6ba", "callbacks=checkpoint_saver")
        with Trainer.from_config(*overrides) as trainer:
            print(trainer.fit().run_dir)

    done = run_ranks(program, 2)
    assert done[0].stdout.splitlines()[-1] == done[1].stdout.splitlines()[-1]
    assert len(run_folders(folder)) == 1


def test_packages_are_attributes_of_runner_without_an_import():
    assert all(runner.__getattr__(name).__name__ == f"runner.{name}" for name in ("callbacks", "algorithms", "data"))
