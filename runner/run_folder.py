"""Folders of runs and sweeps: each made for one alone, removed again when nothing came of it."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import OmegaConf

from runner.launch import is_rank_zero
from runner.wrong_config import WrongConfig

_made: list[Path] = []  # by this process, since the last clean-up


def register_resolver() -> None:
    """Let `${run_folder:base}` in a config name a new folder, one per config."""
    OmegaConf.register_new_resolver("run_folder", make_run_folder, use_cache=True, replace=True)


def make_run_folder(base: str) -> str:
    """Return a new folder `base/<date>/<time>`, made for this run alone, however many start in one second.

    Args:
        base: relative to the working directory.

    Raises:
        OSError: it cannot be made.
    """
    now = datetime.datetime.now()
    day = Path(base).absolute() / f"{now:%Y-%m-%d}"
    _made.extend(folder for folder in (day.parent.parent, day.parent, day) if not folder.exists())
    day.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        folder = day / (f"{now:%H-%M-%S}" if number == 1 else f"{now:%H-%M-%S}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        _made.append(folder)
        return str(folder)
    raise OSError(f"no free folder name in {day}")


def remove_unused() -> None:
    """Remove those folders made here that nothing came into but Hydra's list of a sweep's overrides."""
    while _made:
        folder = _made.pop()
        with suppress(OSError):
            if os.listdir(folder) == ["multirun.yaml"]:
                (folder / "multirun.yaml").unlink()
            folder.rmdir()


@contextmanager
def removed_when_refused(run_dir: Path) -> Iterator[None]:
    """On a WrongConfig inside, remove the run's folder, if it was empty before. Rank 0."""
    is_new = is_rank_zero() and run_dir.is_dir() and not any(run_dir.iterdir())
    try:
        yield
    except WrongConfig:
        if is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def run_folder_of(path: str) -> Path:
    """Return the folder of the run that a path names: itself, or the one around a checkpoint."""
    folder = Path(path).absolute()
    return folder.parent.parent if (folder / "manifest.json").exists() else folder
