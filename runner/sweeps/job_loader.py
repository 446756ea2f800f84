"""The configs of a sweep's jobs: Hydra composes one per combination of group choices; other values are set in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.cli.command_line import key_of
from runner.config.composed import to_plain
from runner.config.composing import parse_override
from runner.config.replaced import without_replaced
from runner.history.rerun import options_of
from runner.libraries.shortcuts import is_enabled

ANY = "*"  # stands for every key, because a resolver may depend on any


class JobLoader(ConfigLoaderImpl):
    """Composes the configs of a sweep's jobs, for Hydra and for the check before the first job.

    Hydra takes a fifth of a second to compose a config. So jobs that differ only in values, such as `seed=1` and
    `seed=2`, share one. A job's values are set in it as Hydra would set them, and stay until the next job is loaded.
    """

    def __init__(self, master: DictConfig) -> None:
        hydra: Any = GlobalHydra.instance().hydra
        super().__init__(hydra.config_loader.get_search_path())
        hydra.config_loader = self
        self._master = master
        self._shared: dict[tuple[str, ...], _SharedConfig] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shared": {}}  # a launcher pickles the loader along with each job

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the config of the job with these overrides."""
        shared = self._find_shared(sweep_overrides)
        shared.update_hydra()
        return shared.config

    def plain(self, overrides: Sequence[str], number: int) -> tuple[dict[str, Any], list[str]]:
        """Return the resolved config of a job, and what `without_replaced` removed from it. Jobs may share sections."""
        shared = self._find_shared(overrides)
        return shared.plain(number), shared.dropped

    def _find_shared(self, overrides: Sequence[str]) -> _SharedConfig:
        """Return a config with the values of a job: one that an earlier job left, or a new one."""
        if not is_enabled("composing"):
            return _SharedConfig(super().load_sweep_config(self._master, [*overrides]), overrides)
        group = _without_values((*overrides,), frozenset(self._master.hydra.runtime.choices))
        if (shared := self._shared.pop(group, None)) is not None:
            try:
                shared.set_values(overrides)
            except OmegaConfBaseException:
                shared = None  # Hydra explains what is wrong
        if shared is None:
            shared = _SharedConfig(super().load_sweep_config(self._master, [*overrides]), overrides)
        self._shared[group] = shared
        return shared


class _SharedConfig:
    """A config that jobs share; it holds the values of one job at a time."""

    def __init__(self, config: DictConfig, overrides: Sequence[str]) -> None:
        self.config = config
        self.dropped: list[str] = []
        self._overrides = overrides
        self._without_hydra: DictConfig | None = None  # a copy without Hydra's section
        self._plain: dict[str, Any] = {}  # the resolved config of the first job
        self._changed: set[str] = set()  # sections in which values were set
        self._names: dict[str, set[str]] = {}  # by section, names to which its interpolations may refer

    def set_values(self, overrides: Sequence[str]) -> None:
        """Set the values of another job."""
        for before, after in zip(self._overrides, overrides, strict=True):
            if before != after:
                override = parse_override(after)
                self._changed.add(key_of(after).partition(".")[0])
                for config in filter(None, (self.config, self._without_hydra)):
                    OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        self._overrides = overrides

    def update_hydra(self) -> None:
        """Write the job's overrides to Hydra's section."""
        hydra = self.config.hydra
        OmegaConf.set_readonly(hydra, False)
        task = [override for override in map(parse_override, self._overrides) if not override.is_hydra_override()]
        lines = [override.input_line for override in task]
        if OmegaConf.to_container(hydra.overrides.task) != lines:
            hydra.overrides.task = lines
            hydra.job.override_dirname = get_overrides_dirname(task, **hydra.job.config.override_dirname)

    def plain(self, number: int) -> dict[str, Any]:
        """Return the resolved config of the job with this number."""
        uses_hydra = any("hydra" in names for names in self._names.values())
        if self._without_hydra is None or uses_hydra:
            self.update_hydra()
            with read_write(self.config.hydra), open_dict(self.config.hydra):
                self.config.hydra.job.num = number
                self.config.hydra.job.id = str(number)
                self.config.hydra.runtime.output_dir = self.config.hydra.sweep.dir
            HydraConfig.instance().set_config(self.config)
        if self._without_hydra is None:
            copy = OmegaConf.masked_copy(self.config, [str(key) for key in self.config if key != "hydra"])
            self._without_hydra, self.dropped = without_replaced(copy, self._overrides, options_of(self.config.hydra))
            self._plain = to_plain(self._without_hydra)
            raw: Any = OmegaConf.to_container(self._without_hydra)
            self._names = {key: _find_names(raw[key]) for key in self._plain}
        return {**self._plain, **{key: _resolve(self._without_hydra[key]) for key in self._find_varied()}}

    def _find_varied(self) -> set[str]:
        """Return the sections that may differ between jobs: those with changed values, and any that refer to them."""
        varied = {ANY, *self._changed}
        while more := {key for key, names in self._names.items() if key not in varied and names & varied}:
            varied |= more
        return varied & self._plain.keys()


def _find_names(section: Any) -> set[str]:
    """Return the names to which interpolations in a section may refer: all of its words, if it has interpolations."""
    text = repr(section)
    calls = re.search(r"\$\{(?!oc\.env:)[\w.]+:", text)
    return {*re.findall(r"\w+", text), *([ANY] if calls else [])} if "${" in text else set()


def _resolve(section: Any) -> Any:
    is_plain = not OmegaConf.is_config(section)
    return section if is_plain else OmegaConf.to_container(section, resolve=True, throw_on_missing=True)


@cache
def _kind(override: str) -> str:
    """Return the kind of an override's value, 'scalar' or 'list'; empty if Hydra must compose a config for it."""
    parsed = parse_override(override)
    if parsed.is_delete() or parsed.is_sweep_override() or parsed.package is not None:
        return ""
    value = parsed.value()
    values = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(value, int | float | str | None) and value != "???" for value in values)
    if not is_plain or "${" in override or not re.fullmatch(r"(?!hydra\.)[\w.-]+", parsed.key_or_group):
        return ""
    return "list" if isinstance(value, list) else "scalar"


@cache
def _without_values(overrides: tuple[str, ...], groups: frozenset[str]) -> tuple[str, ...]:
    """Return overrides in which each value that can be set in a composed config is replaced by its kind."""
    keys = [key for override in overrides if (key := key_of(override)) not in groups or "{" in override]

    def overlap(key: str, other: str) -> bool:
        return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")

    def replace(override: str) -> str:
        key = key_of(override)
        kind = [other for other in keys if overlap(key, other)] == [key] and _kind(override)
        return f"{override.partition('=')[0]}={kind}" if kind else override

    return (*map(replace, overrides),)
