"""Building a trainer from a config: what is made, in which order, and errors that name their section."""

from __future__ import annotations

import copy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from runner import Callback, ClassificationModel
from runner.config import build
from runner.config.composed import targets
from runner.config.composing import initialized
from runner.config.experiment import Experiment
from runner.config.section import Section
from runner.failures.errors import ConstructorFailed
from runner.failures.facts import facts_of

CONF = Path(__file__).resolve().parents[2] / "conf"
MADE: list[str] = []


class Witness(Callback):
    """Records in `MADE` that it was made."""

    def __init__(self, name: str = "witness", size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"size={size!r}: must be at least 1")
        MADE.append(name)
        self.name = name

    @classmethod
    def warm_up(cls) -> None:
        MADE.append("warm")

    def init(self, state: Any, logger: Any) -> None:
        if self.name.endswith("at once"):
            raise ValueError("size is refused" if "plain" in self.name else "size=1: is refused")

    def fit_start(self, state: Any, logger: Any) -> None:
        if self.name == "refuses":
            raise ValueError("name='refuses' is refused")


class Careless(torch.optim.Optimizer):
    """An optimizer that does not check its arguments."""

    def __init__(self, params: Any, lr=0.1) -> None:
        super().__init__(params, {"lr": lr})


def load_tiny(batch_size: int = 4) -> tuple[Any, Any]:
    MADE.append("data")
    batches = [(torch.zeros(batch_size, 64), torch.zeros(batch_size, dtype=torch.int64))]
    return batches, batches


def make_classifier(classes: int) -> ClassificationModel:
    return ClassificationModel(torch.nn.Linear(64, classes), classes)


@pytest.fixture(scope="module")
def default() -> Any:
    with initialized(CONF):
        config: Any = OmegaConf.to_container(
            compose("config", ["model=mlp", "callbacks=none", "algorithms=none"]), resolve=True
        )
    config.pop("experiment", None)
    return config


@pytest.fixture
def config(default: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small config with two callbacks; the targets are in this file."""
    monkeypatch.setitem(sys.modules, "built_here", sys.modules[__name__])
    MADE.clear()
    made = copy.deepcopy(default)
    made["data"] = {"_target_": "built_here.load_tiny", "batch_size": 4}
    made["callbacks"] = {
        "first": {"_target_": "built_here.Witness", "name": "a"},
        "second": {"_target_": "built_here.Witness", "name": "b"},
    }
    made["trainer"] |= {"max_duration": "1ba", "device": "cpu"}
    return made


def test_a_check_makes_no_object_and_does_not_change_the_config(config: Any):
    before = copy.deepcopy(config)
    build.check(Experiment(config))
    assert MADE == []
    assert config == before


def test_a_trainer_is_built_as_configured(config: Any, tmp_path: Path):
    with build.build(Experiment(config), tmp_path / "run", "a run") as trainer:
        state = trainer.state
        assert [callback.config_key for callback in state.callbacks if isinstance(callback, Witness)] == [
            "first",
            "second",
        ]
        assert (state.run_name, state.run_dir, state.config) == ("a run", tmp_path / "run", config)
        assert str(state.max_duration) == "1ba"
        assert isinstance(state.optimizers[0], torch.optim.SGD)
        assert state.optimizers[0].param_groups[0]["momentum"] == 0.9
        trainer.fit()
        assert state.timestamp.batch == 1
    assert not (tmp_path / "run").exists()
    assert MADE == ["a", "b", "data"]


def test_an_argument_of_an_own_model_named_classes_may_be_a_number(config: Any, tmp_path: Path):
    config["model"] = {"_target_": "built_here.make_classifier", "classes": 3}
    with build.build(Experiment(config), tmp_path / "run", "a run") as trainer:
        assert trainer.state.unwrapped_model.num_classes == 3


def test_initial_weights_depend_only_on_the_seed(config: Any, tmp_path: Path):
    def weights(seed: int, *without: str) -> torch.Tensor:
        changed = copy.deepcopy(config) | {"seed": seed}
        for key in without:
            del changed["callbacks"][key]
        torch.rand(seed + 3)  # earlier random numbers do not matter
        with build.build(Experiment(changed), tmp_path, "") as trainer:
            return torch.cat([weight.detach().flatten() for weight in trainer.state.unwrapped_model.parameters()])

    assert torch.equal(weights(1), weights(1, "first"))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("group", "section", "note"),
    [
        ("callbacks", {"first": {"_target_": "built_here.Witness", "size": 0}}, "in callbacks.first.size (built_here"),
        ("optimizer", {"_target_": "torch.optim.SGD", "_partial_": True, "lr": -1}, "in optimizer (torch.optim.SGD)"),
        ("scheduler", {"_target_": "runner.optim.schedulers.linear", "alpha_f": -1}, "in scheduler.alpha_f (runner"),
    ],
)
def test_a_constructor_error_names_its_section_before_data_is_read(
    config: Any, tmp_path: Path, group: str, section: Any, note: str
):
    with pytest.raises(ValueError) as raised:
        build.build(Experiment(config | {group: section}), tmp_path, "")
    assert raised.value.__notes__[0].startswith(note)
    assert "data" not in MADE


def test_a_string_as_learning_rate_is_refused_even_if_the_optimizer_accepts_it(config: Any, tmp_path: Path):
    config["optimizer"] = {"_target_": "built_here.Careless", "_partial_": True, "lr": "abc"}
    with pytest.raises(TypeError, match="lr='abc': must be a number") as raised:
        build.build(Experiment(config), tmp_path, "")
    assert raised.value.__notes__ == ["in optimizer.lr (built_here.Careless)"]
    assert "data" not in MADE


def test_a_wrong_nested_argument_is_named_by_its_full_key(config: Any, tmp_path: Path):
    config["model"]["module"]["dropout"] = 2
    with pytest.raises(ValueError) as raised:
        build.build(Experiment(config), tmp_path, "")
    assert raised.value.__notes__ == ["in model.module.dropout (runner.models.MLP)"]
    facts = facts_of(raised.value)
    assert (facts.section, facts.argument, facts.key) == ("model.module", "dropout", "model.module.dropout")
    assert facts.target == "runner.models.MLP"


def test_an_unusual_constructor_error_names_its_section(config: Any, tmp_path: Path):
    """Without an argument's name, the message names the innermost section that failed."""
    config["model"]["module"] = {"_target_": "torch.nn.Linear", "in_features": -3, "out_features": 4}
    with pytest.raises(ConstructorFailed, match="RuntimeError: .*negative dimension -3") as raised:
        build.build(Experiment(config), tmp_path, "")
    assert raised.value.__notes__ == ["in model.module (torch.nn.Linear)"]
    facts = facts_of(raised.value)
    assert (facts.section, facts.argument, facts.key) == ("model.module", "", "")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_argument_that_only_the_trainer_can_check_is_named_by_its_key(config: Any, tmp_path: Path):
    config["scheduler"] = {"_target_": "runner.optim.schedulers.cosine_annealing", "t_warmup": "2ba"}
    build.check(Experiment(config))
    with pytest.raises(ValueError) as raised:
        build.build(Experiment(config), tmp_path, "")
    assert "in scheduler.t_warmup (runner.Trainer)" in raised.value.__notes__


@pytest.mark.parametrize("kind", ["list", "dict", "str"])
def test_data_that_return_no_pair_of_loaders_are_refused(kind: str, config: Any, tmp_path: Path):
    config["data"] = {"_target_": f"builtins.{kind}"}
    with pytest.raises(
        TypeError, match=rf"data: builtins.{kind} must return .* eval_loader, test_loader\), not a {kind}"
    ):
        build.build(Experiment(config), tmp_path, "")


def test_a_config_can_replicate_a_loader_on_all_ranks():
    loader = {"_target_": "torch.utils.data.DataLoader", "dataset": [1, 2, 3]}
    made = Section("data.eval", {"_target_": "runner.data.Replicated", "loader": loader}).make()
    assert made.ranks_read == "everything" and len(made) == 3


def test_an_error_in_a_hook_names_callback_and_key(config: Any, tmp_path: Path):
    config["callbacks"]["second"]["name"] = "refuses"
    trainer = build.build(Experiment(config), tmp_path, "")
    with pytest.raises(ValueError) as raised, build.naming_hooks(Experiment(config)), trainer:
        trainer.fit()
    assert "in callbacks.second.name (built_here.Witness)" in raised.value.__notes__
    facts = facts_of(raised.value)
    assert (facts.raised_by, facts.key) == ("second", "callbacks.second.name")
    assert facts.event is not None and facts.timestamp is not None


@pytest.mark.parametrize(("name", "key"), [("at once", "second.size"), ("plain, at once", "second")])
def test_an_error_in_init_names_callback_and_key(name: str, key: str, config: Any, tmp_path: Path):
    config["callbacks"]["first"]["size"] = config["callbacks"]["second"]["size"] = (
        1  # the note names the second callback
    )
    config["callbacks"]["second"]["name"] = name
    with pytest.raises(ValueError) as raised:
        build.build(Experiment(config), tmp_path, "")
    assert f"in callbacks.{key} (built_here.Witness)" in raised.value.__notes__


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {}}, "modle: no such key; did you mean 'model'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": True}, "seed=True"),
        ({"seed": None}, "seed=None"),
        ({"run_name": ["x"]}, r"run_name=\['x'\]: must be a name, or null"),
        ({"run_name": True}, "run_name=True: must be a name, or null"),
        ({"experiment_name": {}}, "experiment_name={}"),
        ({"model": None}, "model: none is chosen, and every run needs one; write model=<name>: dpo, gpt, "),
        ({"data": {"x": 1}}, "data={'x': 1}: needs a `_target_`"),
        ({"optimizer": None}, "optimizer: none is chosen"),
        ({"callbacks": {"x": None}}, "callbacks.x=None: needs a `_target_`"),
        ({"algorithms": {"x": 3}}, "algorithms.x=3: needs a `_target_`"),
        (
            {"callbacks": {"_target_": "own.Mine"}},
            "callbacks._target_='own.Mine': has no name; a file of callbacks/",
        ),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_built_is_refused(config: Any, change: Any, message: str, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(ValueError, match=message):
            build.check(Experiment(config | change))
    assert MADE == []


@pytest.mark.parametrize(("path", "reason"), [("nowhere", "no such folder"), (".", "no complete checkpoint there")])
def test_a_run_without_a_checkpoint_is_refused(path: str, reason: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"RUN='{path}': {reason}; give a run's folder, or a checkpoint's"):
        build.checkpoint_of("RUN", path)


def test_a_missing_load_path_is_refused_by_the_check(config: Any):
    config["trainer"]["load_path"] = "nowhere"
    with pytest.raises(ValueError, match="trainer.load_path='nowhere': no such folder"):
        build.check(Experiment(config))


def test_training_on_the_meta_device_is_refused(config: Any):
    config["trainer"]["device"] = "meta"
    with pytest.raises(ValueError, match="trainer.device='meta': holds no values to train; runner check"):
        build.check(Experiment(config))


def test_warm_up_runs_for_each_callback_and_ignores_wrong_targets(config: Any):
    config["callbacks"] |= {"x": {"_target_": "nowhere.X"}}
    build.warm_up(Experiment(config).callbacks)
    assert MADE == ["warm", "warm"]
    build.warm_up(Experiment(config | {"callbacks": None}).callbacks)
    assert MADE == ["warm", "warm"]


def test_targets_in_lists_and_nested_sections_are_found():
    config = {"a": {"_target_": "A", "b": {"_target_": "B"}}, "c": [{"_target_": "C"}, 3], "d": "x"}
    assert [(path, section["_target_"]) for path, section in targets(config)] == [
        ("a", "A"),
        ("a.b", "B"),
        ("c[0]", "C"),
    ]


def test_a_target_that_runs_shell_commands_is_refused_under_any_alias(config: Any, tmp_path: Path):
    config["callbacks"]["first"] = {"_target_": "logging.os.system", "_args_": [f"touch {tmp_path}/ran"]}
    with pytest.raises(InstantiationException, match=r"'os\.system' \(resolved from 'logging\.os\.system'\)"):
        build.make_parts(Experiment(config))
    assert not list(tmp_path.iterdir())


def test_required_hydra_versions_refuse_aliases_of_os_system():
    """Hydra 1.3.5 blocks only the name `os.system`, and no alias such as `logging.os.system`."""
    requirements = tomllib.loads((CONF.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    (hydra,) = (package for package in map(Requirement, requirements) if package.name == "hydra-core")
    assert "1.3.6" in hydra.specifier and "1.3.5" not in hydra.specifier
