"""Differences between the supported versions of Hydra and OmegaConf: 1.3 and 2.3, 1.4 and 2.4."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import omegaconf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf

_IS_OLD = hydra.__version__.startswith("1.3.")
BASE: dict[str, Any] = {"version_base": "1.3"} if _IS_OLD else {}
"""An argument for functions of Hydra that 1.3 needs, and 1.4 warns of."""


_composing = threading.RLock()  # Hydra's state is one for all threads


@contextmanager
def initialized(conf: str | Path, job_name: str = "app") -> Iterator[None]:
    """Let `hydra.compose` read a folder of config groups within the context, one thread at a time.

    Hydra's state is put back afterwards, as a run or another program of Hydra may be using it.
    """
    with _composing:
        outer = GlobalHydra.instance().hydra
        base = VersionBase.instance().version_base
        name = JobRuntime.instance().get("name")
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(conf), job_name=job_name, **BASE):
                yield
        finally:
            JobRuntime.instance().set("name", name)
            VersionBase.instance().version_base = base
            GlobalHydra.instance().hydra = outer


def add_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Let configs use `${name:...}`, which calls a function once for each config and arguments."""
    is_old = omegaconf.__version__.startswith("2.3.")  # which has another function of the new name
    register: Any = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    register(name, resolver, use_cache=True, replace=True)


@contextmanager
def any_target() -> Iterator[None]:
    """Let Hydra 1.4 call any target in a config, without its warning about a missing allow list.

    That list would have to name the class of each callable object as well, such as that of a model which a function
    returns. Hydra still refuses what runs commands. For records of other people there is `runner.runs.trust`.
    """
    if _IS_OLD:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*hydra\.utils\.instantiate\(\) resolved _target_=")
        yield


def full_key(error: BaseException) -> str | None:
    """Return the key, inside a section, of the target that could not be called; None for the section's own target.

    Hydra gives the key only as a line `full_key: a.b`: 1.3 in the message, 1.4 as a note, which is taken away.
    """
    notes = getattr(error, "__notes__", [])
    found = re.search(r"^full_key: (.+)$", "\n".join([str(error), *notes]), re.MULTILINE)
    notes[:] = [one for one in notes if not one.startswith("full_key: ")]
    return None if found is None else found[1]
