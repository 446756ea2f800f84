"""`runner verify`: it trains a run's batches again with the current code, and names the first difference."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed_configs import small_experiment
from python_process import run_python

from runner.checkpoints.digest import read_digests
from runner.cli.command import Command
from runner.failures.errors import WrongKey
from runner.records.run_files import unpacked
from runner.verbs.verify import check, compare

KEPT = ("callbacks=[checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba")
# 18 batches
SMALL = ("model=mlp", "data.batch_size=200", "trainer.max_duration=3ep", "callbacks.checkpoint_saver.keep=-1")
OWN = '''
"""Code of a user."""
import torch
from torch import nn
from torch.nn.functional import relu

from runner import Algorithm, ClassificationModel
from runner.data import TensorLoader
from runner.data.images.digits import load_digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images):
        return self.second(relu(self.first(images.flatten(1))))


class Model(ClassificationModel):
    def __init__(self):
        super().__init__(Net(), 10)


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Gradients(Algorithm):
    def after_train_batch(self, state, logger):
        pass


class Counting(Algorithm):
    def __init__(self):
        self.count = 0

    def batch_end(self, state, logger):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}


def load_data(batch_size, eval_batch_size, seed):
    train, evaluation, *_ = load_digits(batch_size, eval_batch_size, seed=seed)
    return train, evaluation
'''
DEPENDENCY = """from torch import nn


class Net(nn.Linear):
    def __init__(self, **sizes):
        super().__init__(64, 10)

    def forward(self, images):
        return """
OWN_PARTS = (
    *("model._target_=own.Model", "~model.module", "~model.num_classes", "optimizer._target_=own.Optimizer"),
    *("data._target_=own.load_data", "~data.test_samples", "algorithms=none"),
    *("+algorithms.own._target_=own.Gradients", "+algorithms.counting._target_=own.Counting"),
)
MUTATIONS = {
    "samples": ("seed=seed)\n", "seed=seed + 1)\n"),
    "loss": ("relu(self.first(", "(lambda inputs: relu(inputs) * 1.001)(self.first("),
    "gradients": ("        pass", "        next(state.unwrapped_model.parameters()).grad[0, 0] += 1e-6"),
    "weights": (
        "return super().step(closure)",
        "super().step(closure); self.param_groups[0]['params'][0].data += 1e-6",
    ),
    "algorithms": ("self.count += 1", "self.count += 2"),
}


def verify(run_here: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run `verify`, and return the JSON result."""
    return json.loads(run_here("verify", *arguments, "--json", code=code).out)["result"]


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module `own` and a run that uses it, which is equal as long as the module is unchanged."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    run_python(["-m", "runner", *SMALL, *KEPT, *OWN_PARTS, "hydra.run.dir=run"], cwd=folder, check=True)
    equal = run_python(["-m", "runner", "verify", "run", "--batches=5"], cwd=folder, check=True).stdout
    assert "ok verify  equal bit for bit up to batch 5; 5 digests compared" in equal
    return folder


@pytest.mark.parametrize("part", [*MUTATIONS])
def test_a_change_of_the_code_is_reported_with_the_part_that_differs(
    part: str, own_run: Path, tmp_path: Path, run_app: Any
):
    old, new = MUTATIONS[part]
    assert OWN.count(old) == 1
    shutil.copytree(own_run, tmp_path, symlinks=True, dirs_exist_ok=True)
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    os.utime(tmp_path / "own.py", (1, 1))  # otherwise Python might use its old bytecode
    output = run_app("verify", "run", "--batches=5", exit_code=1).stdout
    assert "different  at batch 1, in " in output
    assert f"first      {part}: " in output
    assert "changed    code: own.py" in output


def test_a_new_version_of_a_package_is_reported(tmp_path: Path, run_app: Any):
    site = tmp_path / "site-packages"
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}

    def install(version: str, scale: float) -> None:
        shutil.rmtree(site, ignore_errors=True)
        (site / f"nets-{version}.dist-info").mkdir(parents=True)
        (site / f"nets-{version}.dist-info" / "METADATA").write_text(f"Name: nets\nVersion: {version}\n")
        (site / "nets.py").write_text(f"{DEPENDENCY}{scale} * super().forward(images.flatten(1))\n")

    install("1.0", 1.0)
    model = ("model.module._target_=nets.Net", "algorithms=none")
    run_app(*SMALL, *KEPT, *model, "hydra.run.dir=run", env=env)
    install("1.1", 1.001)
    output = " ".join(run_app("verify", "run", "--batches=3", env=env, exit_code=1).stdout.split())
    assert "changed packages.nets: '1.0' -> '1.1'" in output
    assert "different at batch 1, in loss, gradients, optimizer" in output


@pytest.mark.slow
def test_verify_starts_from_a_checkpoint_and_accepts_a_tolerance(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *KEPT, "callbacks.checkpoint_saver.save_interval=4ba", "hydra.run.dir=run", code=0)
    assert verify(run_here, "run", "--batch=7", "--batches=4") == {
        "equal": True,
        "batch": None,
        "parts": [],
        "agreed": 10,
        "compared": 6,  # from the checkpoint at batch 4
        "changed": [],
    }
    assert verify(run_here, "run")["compared"] == 18
    result = verify(run_here, "run", "--batch=7", "--batches=4", "optimizer.nesterov=false", code=1)
    assert (result["batch"], result["parts"][0]) == (5, "weights")
    small_change = "optimizer.weight_decay=0.00050001"
    assert verify(run_here, "run", "--batches=4", small_change, code=1)["equal"] is False
    assert verify(run_here, "run", "--batches=4", small_change, "--tolerance=0.001")["equal"] is True
    assert verify(run_here, "run", "--batches=8", "optimizer.lr=0.2", "--tolerance=0.001", code=1)["parts"]
    assert verify(run_here, "run", "data.seed=3", "--batches=4", "--tolerance", "0.9", code=1)["parts"] == ["samples"]


@pytest.mark.slow
def test_an_edited_record_is_reported(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *KEPT, "hydra.run.dir=run", code=0)
    config, digests = tmp_path / "run" / "config.yaml", tmp_path / "run" / "digests.jsonl"
    lines = digests.read_text().splitlines()
    digests.write_bytes("\n".join([*lines[::-1], "[1]", '{"batch": "x"}']).encode() + b"\xff\xfe[[[[")
    assert verify(run_here, "run", "--batches=8")["compared"] == 8  # the order of the lines does not matter
    config.write_text(config.read_text().replace("  lr: 0.1\n", "  lr: 0.2\n"))
    output = run_here("verify", "run", "--batches=2", code=1).out
    assert "changed    the record: you did not make it, or it was edited later" in output
    config.write_text("vars: &v\n  me: *v\n")
    error = run_here("verify", "run", code=125).err
    assert "RUN='run': its config.yaml cannot be read: more than 100,000 values" in error
    digests.unlink()
    os.mkfifo(digests)
    with pytest.raises(FileNotFoundError):
        read_digests(tmp_path / "run")


def test_a_run_without_digests_is_refused(run_here: Any):
    run_here(*SMALL, "callbacks=[checkpoint_saver]", "hydra.run.dir=run", code=0)
    error = run_here("verify", "run", code=125).err
    assert "RUN='run': has no digests of batches 1 to 50" in error and "+callbacks=state_digest" in error


@pytest.mark.slow
def test_a_pin_replaces_the_folder_of_a_run(tmp_path: Path, run_here: Any):
    run_here(*SMALL, *KEPT, "hydra.run.dir=run", "+algorithms=[ema]", code=0)
    run_here("verify", "run", "--batches=9", "--pin=pins/pin.yaml", code=0)
    shutil.rmtree(tmp_path / "run")
    pin = tmp_path / "pins" / "pin.yaml"
    assert pin.stat().st_size < 20_000
    _, out, err = run_here("verify", "pins/pin.yaml", code=0)
    assert "ok verify  equal bit for bit up to batch 9; 9 digests compared" in out and "INFO" not in err
    content = yaml.safe_load(pin.read_text())
    assert content["environment"]["packages"]["torch"] and content["config"]["callbacks"] == {}
    content["environment"]["packages"]["torch"] = "1.0"
    content["config"]["optimizer"]["momentum"] = 0.8
    pin.write_text(yaml.safe_dump(content, sort_keys=False))  # as another user might
    result = verify(run_here, "pins/pin.yaml", code=1)
    assert result["batch"] == 1 and any(text.startswith("packages.torch: '1.0' -> ") for text in result["changed"])
    content["config"]["model"]["_target_"] = "os.system"
    pin.write_text(yaml.safe_dump(content, sort_keys=False))
    assert "os.system" in run_here("verify", "pins/pin.yaml", code=125).err


def test_a_run_without_digests_is_pinned_with_new_ones(run_here: Any):
    run_here(*SMALL, "callbacks=[checkpoint_saver]", "hydra.run.dir=run", code=0)
    assert "the new ones are pinned" in run_here("verify", "run", "--batches=3", "--pin=pin.yaml", code=0).out
    assert verify(run_here, "pin.yaml")["compared"] == 3


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a: [", b"- 1", b"config: {}\n", b"x" * 5_000_000])
def test_a_file_that_holds_no_run_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "pin.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"pin\.yaml': contains no run"):
        unpacked(tmp_path / "pin.yaml")


@pytest.mark.slow
def test_a_run_of_two_ranks_is_verified_on_two_ranks_or_one(run_app: Any):
    run_app(*SMALL, *KEPT, "hydra.run.dir=run", "launch.nproc_per_node=2")
    two_ranks = run_app("verify", "run", "--batches=8").stdout
    assert "ok verify  equal bit for bit up to batch 8; 8 digests compared" in two_ranks
    one_rank = run_app("verify", "run", "--batches=8", "launch.nproc_per_node=1").stdout
    assert "in the order of samples only: the run had 2 ranks" in " ".join(one_rank.split())
    assert "Traceback" not in run_app("verify", "run", "--batches=8", "optimizer.lr=0.3", exit_code=1).stderr


@pytest.mark.slow
def test_unchanged_runs_are_equal(run_here: Any):
    changes = (
        ["+algorithms=[mixup,ema]"],
        ["+algorithms=swa", "algorithms.swa.update_interval=4ba"],
        ["model.module.dropout=0.3"],
        ["trainer.grad_accum=2"],
        ["optimizer=adamw"],
    )
    for seed, overrides in enumerate(changes):
        run_here(*SMALL, *KEPT, *overrides, f"seed={seed}", f"hydra.run.dir=run{seed}", code=0)
        assert verify(run_here, f"run{seed}", "--batches=18")["equal"] is True


def test_parts_of_digests_are_compared_in_the_given_order():
    line = {"batch": 3, "samples": "a", "loss": "b", "weights": "c", "values": {"loss": 1.0, "weights": 2.0}}
    other = line | {"loss": "x", "weights": "y", "values": {"loss": 1.001, "weights": 2.0}}
    assert compare([line], [line], ("samples", "loss", "weights"), 0.0) == (3, None, (), 1)
    assert compare([line], [other], ("samples", "loss", "weights"), 0.0) == (0, 3, ("loss", "weights"), 1)
    assert compare([line], [other], ("samples", "loss", "weights"), 1e-2).batch is None
    assert compare([line], [other], ("samples", "loss", "weights"), 1e-4).parts == ("loss",)
    assert compare([line], [], ("samples",), 0.0) == (0, None, (), 0)
    without_loss = {"batch": 3, "samples": "a"}
    assert compare([line], [without_loss], ("samples", "loss"), 0.1).parts == ("loss",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch=0: must be a whole number of at least 1"),
        ({"batches": 0}, "--batches=0: must be a whole number of at least 1"),
        ({"tolerance": 1.0}, "--tolerance=1.0: must be a relative difference"),
        ({"tolerance": -0.1}, "--tolerance=-0.1: must be a relative difference"),
        ({"batch": 2, "pin": "x"}, "--pin='x': a pin holds the first batches; leave out --batch"),
    ],
    ids=str,
)
def test_wrong_options_of_verify_are_refused(options: dict[str, Any], message: str):
    check(Command.of("verify", "run"), small_experiment())
    with pytest.raises(WrongKey) as raised:
        check(Command.of("verify", "run", **options), small_experiment())
    assert str(raised.value).startswith(message)
