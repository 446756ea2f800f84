"""Every file of conf/ composes and fits the signatures in the code; callbacks and algorithms are lists to edit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf
from tiers import fast

from runner import Trainer
from runner.cli.command_line import merge_repeated
from runner.config import build
from runner.config.composed import KEYS, targets
from runner.config.composing import initialized
from runner.config.experiment import Experiment
from runner.records.folder import register_resolver
from runner.training.trainer import Trainer as TrainerClass

CONF = Path(__file__).resolve().parents[2] / "conf"
LISTS = ("callbacks", "algorithms")
CHOICES = sorted(
    f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if path.parent.name not in (*LISTS, "sweep")
)
ADDED = sorted(f"+{name}={path.stem}" for name in LISTS for path in (CONF / name).glob("*.yaml"))
# The lists have a test of their own.
ONE_OF_EACH_GROUP = (
    *("data=digits", "data=parquet_shards", "experiment=digits_fast", "experiment=instruction_lora", "launch=default"),
    *("model=hf_causal_lm", "model=timm", "optimizer=adamw", "scheduler=reduce_on_plateau", "trainer=default"),
)
# Arguments without a default.
REQUIRED = {
    "+algorithms=alibi": "algorithms.alibi.max_sequence_length=128",
    "+algorithms=stochastic_depth": "algorithms.stochastic_depth.target_block=BasicBlock",
}
BUILT_IN = [
    "mlflow_logger",
    "checkpoint_saver",
    "crash_bundle",
    "progress_bar",
    "learning_curves",
    "console_summary",
]


@pytest.fixture(scope="module", autouse=True)
def conf() -> Iterator[None]:
    register_resolver()
    with initialized(CONF):
        yield


def composed(*arguments: str) -> dict[str, Any]:
    """Compose the config of a command line, as plain values."""
    config: Any = OmegaConf.to_container(
        compose("config", merge_repeated(arguments)), resolve=True, throw_on_missing=True
    )
    config.pop("experiment", None)
    return config


def shipped(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "none")


@pytest.mark.parametrize("group", LISTS)
def test_all_entries_of_a_list_compose_together_and_fit_their_signatures(group: str):
    config = composed(
        f"+{group}=[{','.join(shipped(group))}]", *(argument for argument in REQUIRED.values() if group in argument)
    )
    build.check(Experiment(config))
    assert {f"{group}.{name}" for name in shipped(group)} <= {path for path, _ in targets(config)}


@pytest.mark.parametrize("choice", fast(["seed=0", *CHOICES, *ADDED], "seed=0", *ONE_OF_EACH_GROUP))
def test_every_file_composes_and_fits_its_signatures(choice: str):
    config = composed(choice, *([REQUIRED[choice]] if choice in REQUIRED else []))
    build.check(Experiment(config))
    paths = [path for path, _ in targets(config)]
    assert {"model", "data", "optimizer", "trainer"} <= {*paths}
    group, _, name = choice.lstrip("+").partition("=")
    if group in LISTS and name != "none":
        assert f"{group}.{name}" in paths


def test_the_default_config_has_the_built_in_callbacks_and_one_seed():
    config = composed()
    assert list(config["callbacks"]) == BUILT_IN
    assert next(iter(config["algorithms"])) == "batch_augment"
    assert config["seed"] == config["trainer"]["seed"] == config["data"]["seed"] == 0
    assert set(config) == set(KEYS)
    assert config["callbacks"]["mlflow_logger"]["experiment_name"] == "runner"


def test_one_seed_sets_trainer_and_data(monkeypatch: pytest.MonkeyPatch):
    config = composed("seed=7")
    assert [config["trainer"]["seed"], config["data"]["seed"]] == [7, 7]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert composed()["callbacks"]["mlflow_logger"]["experiment_name"] == "mine"


def test_trainer_keys_are_the_arguments_of_the_trainer_with_their_defaults():
    section = composed()["trainer"]
    assert section.pop("_target_") == "runner.Trainer"
    parameters = inspect.signature(Trainer).parameters
    assert Trainer is TrainerClass
    made = {"model", "train_dataloader", "eval_dataloader", "optimizers", "schedulers", "algorithms", "callbacks"}
    made |= {"loggers", "resume_path", "run_name", "run_dir", "progress_bar", "config"}
    assert set(section) == set(parameters) - made
    assert [key for key in parameters if key in section] == list(section)
    differing = {key for key, value in section.items() if value != parameters[key].default}
    assert differing == {"max_duration"}  # conf/ sets the length of the default experiment


@pytest.mark.parametrize("group", ["callbacks", pytest.param("algorithms", marks=pytest.mark.slow)])
class TestLists:
    """The syntax that edits the list of callbacks or algorithms."""

    def default(self, group: str) -> list[str]:
        return list(composed()[group])

    def others(self, group: str) -> list[str]:
        known = {*self.default(group), *(choice.partition("=")[2] for choice in REQUIRED)}
        return [name for name in shipped(group) if name not in known][:2]

    def test_plus_appends(self, group: str):
        first, _ = self.others(group)
        assert list(composed(f"+{group}={first}")[group]) == [*self.default(group), first]

    def test_plus_appends_several(self, group: str):
        first, second = self.others(group)
        expected = [*self.default(group), first, second]
        assert list(composed(f"+{group}=[{first},{second}]")[group]) == expected
        assert list(composed(f"+{group}={first}", "seed=1", f"+{group}={second}")[group]) == expected

    def test_an_appended_entry_can_be_configured(self, group: str):
        name, key, value = {
            "callbacks": ("speed_monitor", "window_size", 7),
            "algorithms": ("mixup", "alpha", 0.5),
        }[group]
        assert composed(f"+{group}={name}", f"{group}.{name}.{key}={value}")[group][name][key] == value

    def test_tilde_removes(self, group: str):
        for name in self.default(group):
            left = list(composed(f"~{group}.{name}").get(group) or [])
            assert left == [other for other in self.default(group) if other != name]

    def test_none_empties(self, group: str):
        config = composed(f"{group}=none")
        assert not config.get(group)
        build.check(Experiment(config))

    def test_none_and_plus_keep_only_the_added_entry(self, group: str):
        first, _ = self.others(group)
        assert list(composed(f"{group}=none", f"+{group}={first}")[group]) == [first]

    def test_a_list_replaces(self, group: str):
        first, second = self.others(group)
        assert list(composed(f"{group}=[{second},{first}]")[group]) == [second, first]
        assert list(composed(f"{group}={first}")[group]) == [first]

    def test_two_tildes_remove_two_entries(self, group: str):
        names = self.default(group)[:2]
        left = list(composed(*(f"~{group}.{name}" for name in names)).get(group) or [])
        assert left == self.default(group)[2:]

    def test_a_section_of_the_user_is_appended(self, group: str):
        config = composed(f"+{group}.mine._target_=a.B", f"+{group}.mine.x=1")
        assert list(config[group]) == [*self.default(group), "mine"]
        assert config[group]["mine"] == {"_target_": "a.B", "x": 1}

    def test_an_unknown_choice_is_refused(self, group: str):
        with pytest.raises(HydraException, match="nothing"):
            compose("config", [f"+{group}=nothing"])


@pytest.mark.parametrize("name", shipped("experiment"))
def test_an_experiment_can_be_changed_and_extended(name: str):
    config = composed(f"experiment={name}", "optimizer.lr=0.123", "+callbacks=lr_monitor", "~callbacks.progress_bar")
    build.check(Experiment(config))
    assert config["optimizer"]["lr"] == 0.123
    assert [key for key in [*BUILT_IN, "lr_monitor"] if key != "progress_bar"] == list(config["callbacks"])
