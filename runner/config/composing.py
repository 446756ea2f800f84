"""Composes configs with Hydra, whose state is global, in any thread and inside any program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

VERSION_BASE = "1.3"  # Hydra's own defaults of that version

_composing = threading.RLock()  # all threads share Hydra's state


@cache
def parse_override(override: str) -> Override:
    """Parse an override with Hydra, which takes a millisecond; jobs of a sweep share many overrides."""
    return OverridesParser.create().parse_overrides([override])[0]


@contextmanager
def initialized(conf: str | Path, job_name: str = "app") -> Iterator[None]:
    """Let `hydra.compose` read a folder of config groups within the context, one thread at a time.

    Hydra's state is restored afterwards, because a run or another Hydra program may be using it.
    """
    with _composing:
        outer = GlobalHydra.instance().hydra
        base = VersionBase.instance().version_base
        name = JobRuntime.instance().get("name")
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(conf), job_name=job_name, version_base=VERSION_BASE):
                yield
        finally:
            JobRuntime.instance().set("name", name)
            VersionBase.instance().version_base = base
            GlobalHydra.instance().hydra = outer
