"""The configs of a sweep's jobs equal those that Hydra composes, and Hydra composes once if only values differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from runner.cli.catalogue import CONF
from runner.config.composing import initialized
from runner.sweeps.job_loader import JobLoader

SHARED = ("hydra.run.dir=.", "hydra.sweep.dir=.", "model=mlp")


@pytest.fixture(scope="module")
def sweep_config() -> Any:
    """The config of a sweep, composed once for all tests."""
    with initialized(CONF):
        hydra: Any = GlobalHydra.instance().hydra
        return hydra.compose_config("config", [*SHARED], run_mode=RunMode.MULTIRUN)


@pytest.fixture
def loader(sweep_config: Any) -> Iterator[JobLoader]:
    with initialized(CONF):
        yield JobLoader(copy.deepcopy(sweep_config))
        HydraConfig.instance().cfg = None


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list to which the overrides of each config that Hydra composes are added."""
    composed: list[Any] = []
    load = JobLoader.load_configuration

    def record(*arguments: Any, **options: Any) -> Any:
        composed.append(options["overrides"])
        return load(*arguments, **options)

    monkeypatch.setattr(JobLoader, "load_configuration", record)
    return composed


def load_job(loader: JobLoader, overrides: list[str], number: int) -> tuple[Any, Any]:
    """Return the config of a job for Hydra's launcher, and that for the check before the first job."""
    plain = loader.plain(overrides, number)
    config = loader.load_sweep_config(loader._master, overrides)
    with open_dict(config):  # as launchers do
        config.hydra.job.num = config.hydra.job.id = number
        config.hydra.runtime.output_dir = "."
    return OmegaConf.to_container(config), plain


# Jobs, and how many of their configs Hydra composes.
JOBS = [
    ([["seed=0"], ["seed=1"], ["seed=-1"]], 1),
    ([["optimizer.lr=0.1", "seed=1"], ["optimizer.lr=x", "seed=1"], ["optimizer.lr=null", "seed=2"]], 1),
    ([["model=mlp", "seed=0"], ["model=resnet8", "seed=0"], ["model=mlp", "seed=1"]], 2),
    ([["experiment=digits_plain", "optimizer=adamw", f"optimizer.lr={lr}"] for lr in (0.1, 0.2)], 1),
    ([["+vars.x=1", "seed=${vars.x}"], ["+vars.x=2", "seed=${vars.x}"]], 1),
    ([["+vars.x=1", "run_name=a${vars.x}"], ["+vars.x=2", "run_name=a${vars.x}"]], 1),
    ([["optimizer={lr: 1, momentum: 0}", f"optimizer.lr={lr}"] for lr in (0.1, 0.2)], 2),
]
SLOW_JOBS = [
    ([["model.module.hidden=[8]"], ["model.module.hidden=[16,16]"], ["model.module.hidden=8"]], 2),
    ([["run_name=j${hydra:job.num}", f"seed={seed}"] for seed in range(3)], 1),
    ([["~callbacks.progress_bar", "+callbacks=[speed_monitor]", f"seed={seed}"] for seed in range(2)], 1),
    ([["run_name='a b'"], ['run_name="c=d"'], ["run_name=e"]], 1),
    ([[f"optimizer.lr={lr}", "optimizer={lr: 1}"] for lr in (0.1, 0.2)], 2),
    ([["optimizer.lr=0.5", f"++optimizer.lr={lr}"] for lr in (0.1, 0.2)], 2),
    ([["+vars.d={a: 1}"], ["+vars.d={b: 2}"]], 2),
]


@pytest.mark.parametrize(
    ("jobs", "times"), [*JOBS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_JOBS)]
)
def test_jobs_have_the_configs_that_hydra_composes(
    jobs: list[list[str]], times: int, loader: JobLoader, composed: list[Any], monkeypatch: pytest.MonkeyPatch
):
    jobs = [job if job[0].startswith("model=") else [*job, "model=mlp"] for job in jobs]
    configs = [load_job(loader, job, number) for number, job in enumerate(jobs)]
    assert len(composed) == times
    again = [load_job(loader, job, number) for number, job in reversed([*enumerate(jobs)])]
    assert len(composed) == times and again[::-1] == configs
    monkeypatch.setenv("RUNNER_PUBLIC_ONLY", "composing")
    later = [*enumerate(jobs)][1:]  # Hydra has composed the first one above
    assert [load_job(loader, job, number) for number, job in later] == configs[1:]
    assert len(composed) == times + 2 * len(later)


def test_a_wrong_key_raises_the_error_of_hydra(loader: JobLoader):
    loader.plain(["seed=0", "model=mlp"], 0)
    with pytest.raises(ConfigCompositionException, match="Could not override 'sed'"):
        loader.plain(["sed=1", "model=mlp"], 1)
    assert loader.plain(["seed=2", "model=mlp"], 2)[0]["seed"] == 2


def test_a_pickled_loader_contains_no_composed_configs(loader: JobLoader, composed: list[Any]):
    empty = len(cloudpickle.dumps(loader))
    loader.plain(["seed=0"], 0)
    assert len(cloudpickle.dumps(loader)) == empty
    copy = cloudpickle.loads(cloudpickle.dumps(loader))
    assert copy.load_sweep_config(loader._master, ["seed=1"]).seed == 1


def test_a_sweep_over_seeds_composes_once(run_here: Any, composed: list[Any]):
    run_here("-m", "seed=0,1", "model=mlp", "callbacks=none", "trainer.max_duration=1ba", code=0)
    (job,) = composed
    assert job[1:] == ["seed=0", "model=mlp", "callbacks=none", "trainer.max_duration=1ba"]
