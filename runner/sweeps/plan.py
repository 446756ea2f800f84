"""The jobs of a sweep before the first of them begins: composed and checked, so that no fault is found after hours."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner import build
from runner.composed import to_plain


def typed_overrides(config: DictConfig) -> list[Override]:
    """Return what the sweeper is told: the parameters in its config, then the command line."""
    params = config.hydra.sweeper.get("params") or {}
    lines = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parsed = OverridesParser.create().parse_overrides(lines)
    return [*{one.get_key_element(): one for one in parsed}.values()]  # of a key given twice, the last counts


def compose_jobs(config: DictConfig, typed: list[Override]) -> list[dict[str, Any]]:
    """Return the configs of all jobs, or where a sweeper finds them one by one, of one that there could be."""
    loader = GlobalHydra.instance().config_loader()
    if "basic_sweeper" in config.hydra.sweeper._target_:
        (jobs,) = BasicSweeper.split_arguments(typed, None)
    else:
        jobs = [[_example(one) for one in typed]]
    plain = []
    for number, overrides in enumerate(jobs):
        composed = loader.load_sweep_config(config, list(overrides))
        with read_write(composed.hydra), open_dict(composed.hydra):
            composed.hydra.job.id = composed.hydra.job.num = number
            composed.hydra.runtime.output_dir = config.hydra.sweep.dir
        HydraConfig.instance().set_config(composed)
        plain.append(to_plain(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])))
    HydraConfig.instance().cfg = None
    return plain


def check_jobs(configs: list[dict[str, Any]], launcher: str) -> None:
    """Raise where one of the jobs cannot be built.

    Args:
        configs: of the jobs.
        launcher: Hydra's name for what runs them.

    Raises:
        ValueError: see `build.check`.
    """
    if launcher == "basic":
        build.warm_up(configs[0])
        _check_all(configs)
    else:  # in a process of its own: this one only waits for others, and has no use for torch
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(_check_all, configs).result()


def _check_all(configs: list[dict[str, Any]]) -> None:
    for config in configs:
        build.check(config)


def _example(override: Override) -> str:
    """Return an override with one of the values that are swept."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return f"{key}={override.get_value_element_as_str()}"
    return f"{key}={value.start if isinstance(value, IntervalSweep) else next(override.sweep_string_iterator())}"


def quieten_optuna() -> None:
    """Keep from the terminal what Optuna says about itself, and that its Hydra sweeper calls it by former names."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"optuna\.|hydra_plugins\.hydra_optuna_sweeper")


def short_names(keys: list[str]) -> dict[str, str]:
    """Return for each dotted key its last part, with as many parts before it as tell it apart from the others."""
    plain = {key: key.lstrip("+~") for key in keys}
    parts = {key: name.split(".") for key, name in plain.items()}

    def name(key: str) -> str:
        for depth in itertools.count(1):
            short = ".".join(parts[key][-depth:])
            others = (plain[other] for other in keys if plain[other] != plain[key])
            if depth == len(parts[key]) or not any(f".{other}".endswith(f".{short}") for other in others):
                return short
        raise AssertionError

    return {key: name(key) for key in keys}
