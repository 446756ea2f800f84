"""Makes and finds the folders of runs and sweeps; a folder that stays empty is removed."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from omegaconf import OmegaConf

from runner.checkpoints.manifest import MANIFEST, read_manifest
from runner.cli.verb import Verb
from runner.distributed.environment import is_rank_zero, keep_across_restarts
from runner.failures.errors import UnreadableCheckpoint, WrongConfig, WrongKey
from runner.files.lock import PATIENCE, lock_file
from runner.files.names import CODE, CONFIG, RECORD, RESULT, SESSIONS, SWEEP
from runner.files.whole import read_object, write_atomically
from runner.records.listing import LOCK, OUTPUTS, RUNS
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

LOG = "console.log"  # in the folder of a job of a sweep or of Slurm: the output of its newest attempt
ATTEMPTS = "attempts"  # holds a numbered folder for the output of each earlier attempt
INDEX = ".index.json"  # beside the folders of sweeps: maps the identity of a sweep to its folder
INDEX_LOCK = ".index.lock"  # locked while the index changes

REPLACED = (*RECORD, CODE, SESSIONS)
"""Names that a run replaces in its folder."""

_made: list[Path] = []  # folders that this process has made since the last clean-up


def register_resolver() -> None:
    """Register `${run_folder:base}`, which names a new folder for each config."""
    OmegaConf.register_new_resolver("run_folder", _run_folder, use_cache=True, replace=True)


def use(verb: Verb) -> None:
    """Make the resolver return a temporary folder if the verb of the command keeps nothing."""
    global _leaves_nothing
    _leaves_nothing = verb.folder == "temporary"


_leaves_nothing = False


def _run_folder(base: str) -> str:
    if _leaves_nothing:  # the working directory may not be writable
        folder = tempfile.mkdtemp(prefix="runner-")
        _made.append(Path(folder))
        return folder
    return make_run_folder(base)


def make_run_folder(base: str, purpose: str = "") -> str:
    """Make a folder `base/<date>/<time>` for this run alone, even if several start in one second, and return it.

    A restarted process gets the same folder. `purpose` distinguishes the folders if one command makes several.

    Raises:
        OSError: the folder cannot be made.
    """
    folder = keep_across_restarts(f"folder/{base}{purpose}", lambda: _make_folder(base))
    watch(Path(folder))
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def check_unused(run_dir: Path) -> None:
    """Check that a new run would replace nothing in its folder but files of another run."""
    names = [name for name in REPLACED if os.path.lexists(run_dir / name)]
    if names and not read_object(run_dir / RESULT):
        raise WrongConfig(
            f"hydra.run.dir={show_path(run_dir)!r}: has {', '.join(names)}, which no run wrote but a run would "
            "replace; choose a new folder"
        )


def _make_folder(base: str) -> str:
    now = datetime.datetime.now()
    day = Path(base).absolute() / f"{now:%Y-%m-%d}"
    watch(day)
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


def remembered_folder(base: str, identity: str, renew: bool) -> str:
    """Return the folder that this sweep had under `base` before, or a new one if it had none or `renew` is set.

    Raises:
        OSError: the folder cannot be made.
        TimeoutError: another process keeps the index of folders locked.
    """
    root = Path(base).absolute()
    watch(root)
    root.mkdir(parents=True, exist_ok=True)
    if (lock := lock_file(root / INDEX_LOCK, PATIENCE)) is None:
        raise TimeoutError(f"{root / INDEX}: another process has held it for {PATIENCE:g} s; stop it and try again")
    with lock:
        # Without an intact index, the sweep of each folder is read from the folder itself, the latest last.
        listed = read_object(root / INDEX) or {
            read_object(file).get("identity"): str(file.parent.relative_to(root))
            for file in sorted(root.glob(f"*/*/{SWEEP}"), key=_changed_at)
        }
        known = {key: name for key, name in listed.items() if key and isinstance(name, str) and (root / name).is_dir()}
        if renew or identity not in known:
            known[identity] = str(Path(make_run_folder(base)).relative_to(root))
        write_atomically(root / INDEX, json.dumps(known, indent=1))
    return str(root / known[identity])


def begin_log(run_dir: Path) -> str:
    """Return the path of an attempt's log; the previous attempt's moves to `attempts/1`, `attempts/2` etc. Rank 0.

    Raises:
        OSError: the log cannot be moved.
    """
    log = run_dir / LOG
    if log.exists():
        before = [int(path.name) for path in run_dir.glob(f"{ATTEMPTS}/*") if path.name.isdecimal()]
        folder = run_dir / ATTEMPTS / f"{max(before, default=0) + 1}"
        folder.mkdir(parents=True)
        log.rename(folder / LOG)
    return str(log)


def watch(folder: Path) -> None:
    """Note which of a folder and its parents do not exist yet, for `remove_unused` to check later."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    _made.extend(reversed(new))


def remove_empty(folder: Path) -> None:
    """Remove the folder of a job if it is empty, unless it is the working directory."""
    if folder.resolve() != Path.cwd():
        with suppress(OSError):
            folder.rmdir()


def remove_unused() -> None:
    """Remove folders that this process made if they are empty, or hold only the files of a sweep without jobs."""
    while _made:
        folder = _made.pop()
        with suppress(OSError):
            left = os.listdir(folder)
            if {*left} <= {"multirun.yaml", SWEEP, INDEX, INDEX_LOCK}:
                for name in left:
                    (folder / name).unlink()
            folder.rmdir()


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in a run's folder within the context. Rank 0.

    If no lock can be made, for example on a full disk, two processes may train in it.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            lock = lock_file(run_dir / LOCK)
            if lock is None:
                raise WrongConfig(f"{str(run_dir)!r}: another process is training this run; wait for it, or stop it")
            stack.enter_context(lock)
        yield


@contextmanager
def removed_when_refused(run_dir: Path) -> Iterator[None]:
    """Remove the run's folder if a WrongConfig is raised within the context and it was empty before. Rank 0."""
    is_empty = is_rank_zero() and run_dir.is_dir() and {*os.listdir(run_dir)} <= {LOCK, LOG}
    is_new = is_empty and not Path.cwd().is_relative_to(run_dir.resolve())  # never the user's working directory
    try:
        yield
    except WrongConfig:
        if is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def checkpoint_before_restart(run_dir: Path) -> str | None:
    """Return the newest checkpoint that this launch wrote into a run's folder before it was restarted. Rank 0.

    Returns None without such a checkpoint or without a restart.
    """
    began = float(keep_across_restarts(f"began/{run_dir}", lambda: str(time.time())))
    if not saved_since(run_dir, began):
        return None
    from runner.checkpoints.files import find_checkpoint

    checkpoint = find_checkpoint(run_dir)
    return str(checkpoint) if (checkpoint / "state.pt").exists() else None  # a checkpoint may hold weights only


def saved_since(run_dir: Path, began: float) -> list[Path]:
    """Return the manifests of a run's checkpoints that were written after `began`, in seconds since 1970."""
    return [path for path in run_dir.glob(f"*/[!.]*/{MANIFEST}") if path.stat().st_mtime > began]


def run_folder_of(path: str) -> Path | None:
    """Return a run's folder from its own path or that of a checkpoint; None for a checkpoint outside of runs."""
    folder = Path(path).absolute()
    if not (folder / MANIFEST).exists():
        return folder
    run_dir = folder.parent.parent
    return run_dir if folder.parent.name == "checkpoints" or (run_dir / CONFIG).is_file() else None


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, damaged ones too, wherever its config saves them.

    An interrupted save does not count, because its folder has no final name yet.
    """
    folders = {*run_dir.glob("checkpoints/*/"), *(path.parent for path in run_dir.rglob(MANIFEST))}
    return sorted(path for path in folders if ".partial-" not in path.name and not path.is_symlink())


def require_latest_run() -> Path:
    """Return the run that `latest` means, see `latest_run`.

    Raises:
        WrongKey: no run has written a checkpoint.
    """
    if (run := latest_run()) is None:
        raise WrongKey("RUN", f"no run in {OUTPUTS}/ has written a checkpoint; give a run's folder", "'latest'")
    return run


def latest_run() -> Path | None:
    """Return the run in this working directory that wrote a checkpoint last, or None.

    A job of a sweep is returned only if there is no other run, because a sweep leaves out jobs that were changed. Only
    names, times and one manifest are read: one run among ten thousand is found in a tenth of a second. Runs without a
    readable manifest are skipped.
    """
    folders = {*(path for runs in RUNS for path in Path(OUTPUTS).glob(f"{runs}/checkpoints"))}
    folders |= {
        link.parent for runs in RUNS for link in Path(OUTPUTS).glob(f"{runs}/*/latest")
    }  # a config may rename the folder
    newest_first = sorted(((_changed_at(path), path) for path in folders), reverse=True)
    return _latest(newest_first, in_sweep=False) or _latest(newest_first, in_sweep=True)


def _latest(folders: Sequence[tuple[int, Path]], in_sweep: bool) -> Path | None:
    newest = 0
    run = None
    for changed, folder in folders:
        if changed <= newest:
            break  # renaming a checkpoint into a folder changes the folder, so the remaining ones are older
        if is_in_sweep(folder.parent) is not in_sweep:
            continue
        saved = [(_changed_at(manifest), manifest.parent) for manifest in folder.glob(f"[!.]*/{MANIFEST}")]
        last = max((changed for changed, _ in saved), default=0)
        if last > newest and _is_usable(folder.parent, [checkpoint for _, checkpoint in sorted(saved, reverse=True)]):
            newest = last
            run = folder.parent
    return run


def _is_usable(run: Path, checkpoints: Sequence[Path]) -> bool:
    """Return whether one of a run's checkpoints has a readable manifest; print why not."""
    reasons = []
    for checkpoint in checkpoints:
        try:
            read_manifest(checkpoint)
        except (OSError, UnreadableCheckpoint) as error:
            reasons.append(f"{checkpoint.name}: {error}")
        else:
            return True
    reason = f"none of its checkpoints can be read; {reasons[0]}"
    print_to_stderr(f"WARNING: {show_path(run)}: not the latest run, because {reason}")
    return False


def is_in_sweep(run_dir: Path) -> bool:
    """Return whether a run's folder is in the folder of a sweep."""
    return (run_dir.parent / SWEEP).exists()


def _changed_at(path: Path) -> int:
    """Return when a file or folder last changed, in nanoseconds; 0 if it is gone, or a broken link."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
