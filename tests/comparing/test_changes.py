"""Changes to the config of a resumed run are shown, refused unless safe or allowed, and applied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_runs import LONGER, QUIET, ROOT, SHORT, weights
from omegaconf import OmegaConf

from runner.comparing.changes import ABSENT, SAFE, Change, check_changes, find_changes
from runner.config.composed import GROUPS, KEYS

CONFIG: dict[str, Any] = {
    "seed": 0,
    "run_name": None,
    "model": {"_target_": "own.Model", "num_workers": 1, "module": {"_target_": "runner.models.MLP", "dropout": 0.0}},
    "data": {"_target_": "runner.data.images.digits.load_digits", "batch_size": 64, "eval_batch_size": 597, "seed": 0},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    "scheduler": {"_target_": "runner.optim.schedulers.multi_step", "milestones": ["0.5dur"], "t_warmup": "0dur"},
    "trainer": {"_target_": "runner.Trainer", "max_duration": "8ep", "eval_interval": "1ep", "seed": 0},
    "launch": {"nproc_per_node": 1},
    "callbacks": {"lr_monitor": {"_target_": "runner.callbacks.LRMonitor"}},
    "algorithms": {"ema": {"_target_": "runner.algorithms.EMA", "start": "0.0dur", "half_life": "10ba"}},
}


def changed(**values: Any) -> dict[str, Any]:
    """Return the config with changed values; keyword arguments have `__` for the dots of a key."""
    config = json.loads(json.dumps(CONFIG))
    for path, value in values.items():
        *sections, key = path.split("__")
        section = config
        for name in sections:
            section = section[name]
        if value is ABSENT:
            del section[key]
        else:
            section[key] = value
    return config


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"optimizer__lr": 0.2}, "optimizer.lr: 0.1 -> 0.2"),
        ({"optimizer__momentum": ABSENT}, "optimizer.momentum: 0.9 -> (missing)"),
        ({"model__module": {"_target_": "own.Net"}}, "model.module: runner.models.MLP -> own.Net"),
        ({"scheduler": {}}, "scheduler: runner.optim.schedulers.multi_step -> {}"),
        ({"run_name": "b"}, "run_name: null -> b"),
        ({"scheduler__milestones": ["0.5dur", "2ep"]}, "scheduler.milestones: [0.5dur] -> [0.5dur, 2ep]"),
        ({"run_name": "x" * 99}, f"run_name: null -> {'x' * 57}..."),
        ({"seed": 0}, None),
    ],
)
def test_a_difference_is_one_line(change: dict[str, Any], line: str | None):
    assert [str(difference) for difference in find_changes(CONFIG, changed(**change))] == (
        [] if line is None else [line]
    )


@pytest.mark.parametrize(
    ("change", "is_safe"),
    [
        ({"callbacks__lr_monitor": ABSENT}, True),
        ({"callbacks__own": {"_target_": "own.Callback"}}, True),
        ({"launch__nproc_per_node": 2}, True),
        ({"run_name": "b"}, True),
        ({"trainer__max_duration": "16ep"}, True),
        ({"trainer__eval_interval": "2ep"}, True),
        ({"data__eval_batch_size": 100}, True),
        ({"data__num_workers": 2}, True),
        ({"model__num_workers": 2}, False),  # may mean anything in a class of the user
        ({"data__batch_size": 32}, False),
        ({"data__seed": 1}, False),
        ({"seed": 1}, False),
        ({"trainer__seed": 1}, False),
        ({"trainer__precision": "bf16"}, False),
        ({"trainer__max_durations": 1}, False),
        ({"model__module__dropout": 0.1}, False),
        ({"optimizer__lr": 0.2}, False),
        ({"scheduler__t_warmup": "1ep"}, False),
        ({"algorithms__ema": ABSENT}, False),
        ({"algorithms__ema__half_life": "20ba"}, False),
    ],
)
def test_a_change_is_refused_unless_safe_or_allowed(change: dict[str, Any], is_safe: bool):
    (difference,) = find_changes(CONFIG, changed(**change))
    assert difference.is_safe is is_safe
    after = changed(**change)
    for allowed in ([difference.key], [difference.key.partition(".")[0]], []):
        if is_safe or allowed:
            (line,) = check_changes("run", CONFIG, after, [f"{difference.key}=1"], allowed)
            assert line.startswith(str(difference)) and line.endswith(" (--allow-changes)") is not is_safe
        else:
            with pytest.raises(ValueError) as refused:
                check_changes("run", CONFIG, after, [])
            assert str(difference) in str(refused.value)
            assert str(refused.value).endswith(f"add --allow-changes {difference.key}")


def test_every_key_is_listed_as_safe_or_refused():
    """Whoever adds an argument of the Trainer, a group or a key decides here if a resumed run may change it."""
    trainer = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "trainer" / "default.yaml"), resolve=False)
    refused = (
        *("train_subset_num_batches", "iteration_length", "precision", "grad_accum", "microbatch_size", "seed"),
        *("deterministic", "gather_dtype", "compile", "scale_schedule_ratio", "scale_warmup", "load_path"),
        *("step_schedulers_every_batch", "load_strict"),
    )
    assert isinstance(trainer, dict)
    safe = {key for key in trainer if Change(f"trainer.{key}", 0, 1).is_safe}
    assert safe == {key.removeprefix("trainer.") for key in SAFE if key.startswith("trainer.")}
    assert {*trainer} == {"_target_", *refused, *safe}
    assert {*KEYS} == {
        *("model", "data", "folds", "optimizer", "scheduler", "algorithms", "trainer", "seed"),
        *(key for key in SAFE if "." not in key),
    }
    assert {*GROUPS} <= {*KEYS}


def test_an_error_lists_all_refused_keys_and_repeats_the_allowed_ones():
    after = changed(seed=1, trainer__seed=1, optimizer__lr=0.2, run_name="b")
    with pytest.raises(ValueError) as refused:
        check_changes("run", CONFIG, after, [], ["optimizer"])
    assert str(refused.value).splitlines() == [
        "RUN='run': the run was trained with a different config so far:",
        "  seed: 0 -> 1",
        "  trainer.seed: 0 -> 1",
        "To continue with these changes, add --allow-changes optimizer,seed,trainer.seed",
    ]


def test_settings_that_stretch_with_the_duration_are_named():
    (line,) = check_changes("run", CONFIG, changed(trainer__max_duration="16ep"), [])
    assert (
        line == "trainer.max_duration: 8ep -> 16ep; settings in fractions of it stretch: "
        "scheduler.milestones=['0.5dur']"
    )
    before = changed(scheduler={}, algorithms={})
    (line,) = check_changes("run", before, before | {"trainer": {**CONFIG["trainer"], "max_duration": "16ep"}}, [])
    assert line == "trainer.max_duration: 8ep -> 16ep"


def test_allow_changes_takes_only_keys_of_the_config():
    for name, near in (("optimizer.lrr", "'optimizer.lr'"), ("optimiser", "'optimizer'"), ("data.nothing.x", "")):
        with pytest.raises(ValueError, match=f"--allow-changes='{name}': this config has no such key.*{near}"):
            check_changes("run", CONFIG, CONFIG, [], [name])
    gone = changed(algorithms__ema=ABSENT)  # typed again after the first resume
    assert check_changes("run", gone, gone, ["~algorithms.ema"], ["algorithms.ema"]) == []
    assert check_changes("run", CONFIG, CONFIG, [], ["optimizer.lr", "model"]) == []


FAILS = """
from runner import Callback


class Fails(Callback):
    def batch_end(self, state, logger):
        raise ValueError("before the first checkpoint")
"""


def rates(run: Path) -> list[float]:
    """Return the learning rate in a run's newest checkpoint, and the rate that the schedule multiplies."""
    saved = torch.load(run / "checkpoints" / "latest" / "state.pt", weights_only=True)
    (group,) = saved["optimizers"][0]["param_groups"]
    return [group["lr"], group.get("initial_lr", group["lr"])]


def test_resume_refuses_changes_and_applies_allowed_ones(run_here: Any, tmp_path: Path):
    run = tmp_path / "run"
    run_here(*SHORT, *QUIET, "scheduler=constant", "hydra.run.dir=run", code=0)
    shutil.copytree(run, tmp_path / "plain", symlinks=True)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    refused = run_here("resume", "run", LONGER, "optimizer.lr=0.3", "seed=4", code=2)
    assert refused.out == "" and refused.err.splitlines() == [
        "error: RUN='run': the run was trained with a different config so far:",
        "  seed: 0 -> 4",
        "  data.seed: 0 -> 4",
        "  optimizer.lr: 0.1 -> 0.3",
        "  trainer.seed: 0 -> 4",
        "To continue with these changes, add --allow-changes seed,data.seed,optimizer.lr,trainer.seed",
    ]
    assert run_here("check", "run", LONGER, "seed=4", code=2).err.count("seed: 0 -> 4") == 3
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    changes = (LONGER, "optimizer.lr=0.3", "data.eval_batch_size=100", "--allow-changes=optimizer.lr")
    command = ("resume", "run", *changes)
    assert sorted(run_here(*command, code=0).err.splitlines()) == [
        "INFO: data.eval_batch_size: 300 -> 100",
        "INFO: optimizer.lr: 0.1 -> 0.3 (--allow-changes)",
        "INFO: trainer.max_duration: 2ep -> 3ep",
    ]
    assert rates(run) == [0.3, 0.3]
    run_here("resume", "plain", LONGER, code=0)
    assert rates(tmp_path / "plain") == [0.1, 0.1] and weights(tmp_path / "plain", "latest") != weights(run, "latest")
    again = run_here(*command, "trainer.max_duration=4ep", code=0)
    assert again.err == "INFO: trainer.max_duration: 3ep -> 4ep\n"
    assert rates(run) == [0.3, 0.3]


@pytest.mark.parametrize(
    ("start", "change", "part"),
    [
        ((), ("optimizer=adam", "--allow-changes=optimizer"), "cannot continue with another optimizer"),
        pytest.param(
            (),
            ("~optimizer.weight_decay", "--allow-changes=optimizer"),
            "cannot be applied to a resumed run",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (),
            ("scheduler=none", "--allow-changes=scheduler"),
            "has 1 schedulers, this run has 0",
            marks=pytest.mark.slow,
        ),
        ((), ("model.module.hidden=[7]", "--allow-changes=model"), "do not fit the model"),
        pytest.param(
            ("scheduler=none", "+scheduler={_target_:torch.optim.lr_scheduler.StepLR,_partial_:true,step_size:1}"),
            ("optimizer.lr=0.3", "--allow-changes=optimizer"),
            "start a new run from its weights with trainer.load_path=run/checkpoints/ep2-ba6",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["optimizer", "removed", "scheduler", "shapes", "torch's schedule"],
)
def test_a_change_that_does_not_fit_the_checkpoint_is_an_error(
    run_here: Any, tmp_path: Path, start: tuple[str, ...], change: tuple[str, ...], part: str
):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", *start, code=0)
    result = (tmp_path / "run" / "result.json").read_text()
    refused = run_here("resume", "run", LONGER, *change, code=2)
    assert part in refused.err and refused.err.count("error: ") == 1
    assert (tmp_path / "run" / "result.json").read_text() == result


@pytest.mark.slow
def test_a_copied_checkpoint_is_compared_with_its_own_config(run_here: Any, tmp_path: Path):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", "scheduler=none", code=0)
    shutil.copytree(tmp_path / "run" / "checkpoints" / "ep1-ba3", tmp_path / "a" / "b" / "lone")
    same = ("resume", "a/b/lone", *SHORT, *QUIET, "scheduler=none", "hydra.run.dir=new")
    refused = run_here(*same, "data.batch_size=300", "run_name=x", code=2)
    assert "\n  data.batch_size: 400 -> 300\n" in refused.err and "run_name" not in refused.err
    assert run_here(*same, code=0).err == ""
    assert weights(tmp_path / "new", "latest") == weights(tmp_path / "run", "latest")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b"}
    (tmp_path / "a" / "b" / "lone" / "config.json").unlink()  # as saved by the Python API
    manifest = json.loads((tmp_path / "a" / "b" / "lone" / "manifest.json").read_text())
    del manifest["files"]["config.json"]
    (tmp_path / "a" / "b" / "lone" / "manifest.json").write_text(json.dumps(manifest))
    run_here(*same, "data.batch_size=300", "hydra.run.dir=newer", code=0)


@pytest.mark.slow
def test_a_sweep_of_forks_may_change_the_config(run_here: Any, tmp_path: Path):
    run_here(*SHORT, *QUIET, "hydra.run.dir=run", code=0)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    varied = (LONGER, "optimizer.lr=0.1,0.3")
    refused = run_here("-m", "resume", "run", *varied, code=2)
    assert refused.err == "error: -m: resume takes one experiment at a time; leave out -m\n"
    run_here("-m", "fork", "run", "ba6", *varied, "hydra.sweep.dir=forks", code=0)  # a fork may change everything
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    same, other = (tmp_path / "forks" / f"lr{lr}-mlp-digits" for lr in (0.1, 0.3))
    assert rates(same)[1] == 0.1 and rates(other)[1] == 0.3 and weights(same, "latest") != weights(other, "latest")
    result = json.loads((other / "result.json").read_text())
    assert (result["parent"], result["forked_at"]) == (str(tmp_path / "run"), 6)
    run_here("resume", "run", LONGER, code=0)
    assert weights(tmp_path / "run", "latest") == weights(same, "latest")


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink())


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_moves_later_ones_aside(run_here: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(FAILS)
    own = ("+callbacks.own._target_=own.Fails", "--allow-changes=optimizer.lr", "optimizer.lr=0.5")
    run_here(*SHORT, *QUIET, "callbacks.checkpoint_saver.keep=-1", "hydra.run.dir=run", LONGER, code=0)
    run = tmp_path / "run"
    assert checkpoints(run) == ["ep1-ba3", "ep2-ba6", "ep3-ba9"]
    again = run_here("resume", "run/checkpoints/ep1-ba3", *own, code=1)  # fails before its first checkpoint
    assert "checkpoints later than ep1-ba3 do not belong to the resumed run: moved to" in again.err
    assert checkpoints(run) == ["ep1-ba3"] and not (run / "checkpoints" / "latest").is_symlink()
    aside = run / "sessions" / "1" / "checkpoints"
    assert sorted(path.name for path in aside.iterdir()) == ["ep2-ba6", "ep3-ba9"]
    done = run_here("resume", "run", "~callbacks.own", code=0)
    assert "optimizer.lr: 0.1 -> 0.5, in the run's record since that checkpoint was saved" in done.err
    assert checkpoints(run) == ["ep1-ba3", "ep2-ba6", "ep3-ba9"]


@pytest.mark.slow
def test_a_change_of_batches_is_refused_in_the_middle_of_an_epoch(run_here: Any, tmp_path: Path):
    run_here(*SHORT, *QUIET, "callbacks.checkpoint_saver.save_interval=4ba", "hydra.run.dir=run", code=0)
    for change in ("data.batch_size=300", "data.seed=7"):
        arguments = (LONGER, change, f"--allow-changes={change.partition('=')[0]}")
        refused = run_here("resume", "run/checkpoints/ep1-ba4", *arguments, code=2)
        assert "was saved mid-epoch, after 400 samples" in refused.err
        assert "samples" not in run_here("check", "run", *arguments, code=0).err  # check reads no data
    run_here("resume", "run", *arguments, code=0)  # allowed at the end of an epoch


@pytest.mark.slow
def test_checkpoints_in_a_folder_of_another_name_are_found(run_here: Any, tmp_path: Path):
    run_here(*SHORT, *QUIET, "callbacks.checkpoint_saver.folder=saved", "hydra.run.dir=outputs/day/run", code=0)
    for run in ("outputs/day/run", "latest", "outputs/day/run/saved", "outputs/day/run/saved/ep1-ba3"):
        run_here("check", run, LONGER, code=0)
