"""A run's checkpoints at an address: each is uploaded atomically, and verified in both directions.

    <address>/mirror.json                      whose checkpoints these are, and their names: nothing else is removed
              <checkpoint>/index.json          names, sizes and hashes of the other files; written last
                           config.yaml ...     the run's record
                           checkpoints/<checkpoint>/model.pt ...

Each is the folder of a run with a single checkpoint, all that another machine needs to continue. What is read there may
be anybody's: names that lead elsewhere and files that differ from their hashes are refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from runner.checkpoints.manifest import is_name, number, read_manifest
from runner.files.names import CODE, RECORD
from runner.files.whole import link_or_copy, open_regular
from runner.libraries.remote_files import open_address

INDEX = "index.json"
FORMAT = 1
LARGEST_INDEX = 4_000_000  # bytes
LARGEST_RECORD = 100_000_000  # bytes of a file outside of the checkpoint
BLOCK = 1 << 20  # bytes read at a time
OWNER = "mirror.json"
UPLOADED = (*RECORD, CODE, "mlflow/run.json", OWNER)  # the last two identify its MLflow run and its mirror
"""Files and folders of a run that are uploaded with each checkpoint."""


@dataclass(frozen=True)
class Index:
    """The index of one checkpoint at an address.

    Attributes:
        checkpoint: path of the checkpoint in the run's folder, such as `checkpoints/ep2-ba64`.
        saved_at: when it was written, in seconds since 1970.
        best: names of the run's best checkpoints by then, best first.
        files: size and SHA-256 of each file, by its path in the run's folder.
    """

    checkpoint: str
    saved_at: float
    best: list[str]
    files: dict[str, dict[str, Any]]
    format: int = FORMAT

    @classmethod
    def read(cls, text: bytes) -> Index:
        """Return what a file holds."""
        try:
            found = cls(**json.loads(text))
            names = [found.checkpoint, *found.best, *found.files]
            for value in (found.format, found.saved_at, *(one["size"] for one in found.files.values())):
                number(value)
        except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
            raise ValueError(f"its {INDEX} cannot be read ({error})") from None
        if found.format > FORMAT:
            raise ValueError(f"a later version of this project wrote it (format {found.format})")
        for one in names:
            if not _is_inside(one):
                raise ValueError(f"its {INDEX} names {one!r}, which leads out of its folder")
        for name, facts in found.files.items():
            if not name.startswith(f"{found.checkpoint}/") and facts["size"] > LARGEST_RECORD:
                raise ValueError(f"its {name} has {facts['size']:,} bytes, at most {LARGEST_RECORD:,} are read")
        for one in (found.name, *found.best):
            if not is_name(one):
                raise ValueError(f"its {INDEX} names {one!r}, which a checkpoint cannot be called")
        return found

    @property
    def name(self) -> str:
        """Name of the checkpoint, such as `ep2-ba64`."""
        return PurePosixPath(self.checkpoint).name


class Mirror:
    """The checkpoints of one run at an address. All methods wait for the other side.

    Args:
        address: the run's own folder, such as `s3://bucket/runs/NAME`.

    Raises:
        Exception: the file system cannot be reached; each file system has its own errors.
    """

    def __init__(self, address: str) -> None:
        self._remote, self._path = open_address(address)
        self._owner = ""
        self._own: set[str] = set()  # names of the checkpoints that its owner has uploaded

    def claim(self, owner: str, overwrite: bool) -> None:
        """Make the folder that of a run, so that checkpoints can be uploaded.

        Args:
            owner: identifies the run. The folder is new or empty, or has been this run's before.
            overwrite: whether it may also be another run's.

        Raises:
            FileExistsError: the folder holds other files.
            ValueError: its mark cannot be read.
        """
        self._remote.invalidate_cache()
        try:
            with self._remote.open(self._at(OWNER), "rb") as file:
                mark = json.loads(file.read(LARGEST_INDEX))
            known = str(mark["run"])
            names = [str(name) for name in mark["checkpoints"]]
        except FileNotFoundError:
            if self._remote.exists(self._path) and self._remote.ls(self._path, detail=False):
                raise FileExistsError("it holds files that no run has uploaded; choose another run_name=") from None
            known = owner
            names = []
        except (TypeError, LookupError, ValueError, RecursionError) as error:
            raise ValueError(f"its {OWNER} cannot be read ({error})") from None
        if known != owner and not overwrite:
            raise FileExistsError("it holds another run's checkpoints; choose another run_name= for this run")
        self._owner = owner
        self._own = {name for name in names if _is_inside(name) and "/" not in name}

    def saved(self, report: Callable[[str, ValueError], object] = lambda name, error: None) -> dict[str, Index]:
        """Return the index of each whole checkpoint by name, the newest first.

        Args:
            report: called with the name of each one that cannot be used, and why.
        """
        found = {}
        for name in self.names():
            try:
                found[name] = self.read_index(name)
            except FileNotFoundError:
                pass  # its upload was interrupted
            except ValueError as error:
                report(name, error)
        return dict(sorted(found.items(), key=lambda one: one[1].saved_at, reverse=True))

    def names(self) -> list[str]:
        """Return the names of all folders there that may be checkpoints, whole or not."""
        self._remote.invalidate_cache()
        try:
            entries = self._remote.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        names = [one["name"].rstrip("/").rpartition("/")[2] for one in entries if one["type"] == "directory"]
        return [*filter(is_name, names)]

    def read_index(self, name: str = "") -> Index:
        """Return the index of a checkpoint; without a name, of the one that the address itself is.

        Raises:
            FileNotFoundError: the checkpoint does not exist or is incomplete.
            ValueError: it cannot be used.
        """
        with self._open(self._at(name, INDEX)) as file:
            index = Index.read(file.read(LARGEST_INDEX))
        if name not in ("", index.name):
            raise ValueError(f"it holds the checkpoint {index.name!r}, not the one that it is called after")
        return index

    def upload(self, folder: Path, name: str, checkpoint: str, best: Sequence[str]) -> None:
        """Upload a folder as one checkpoint, replacing another of the run of that name, and read it back.

        If that fails, what was uploaded is removed, if possible: it would take the room that the next one needs. The
        folder is that of a run with one checkpoint, and must not change during the upload. `best` are sorted, best
        first.

        Raises:
            FileExistsError: the run has not uploaded what has that name there.
            OSError: a file that was read back differs from the upload.
        """
        if name not in self._own:
            if self._remote.exists(self._at(name)):
                raise FileExistsError(f"this run has not uploaded the folder {name} there; remove it, or rename it")
            mark = {"run": self._owner, "checkpoints": sorted({*self._own, name})}
            self._remote.makedirs(self._path, exist_ok=True)
            self._remote.pipe_file(self._at(OWNER), json.dumps(mark).encode())
            self._own.add(name)
        manifest = read_manifest(folder / checkpoint)
        index = Index(checkpoint, manifest.saved_at, list(best), _facts(folder, checkpoint, manifest.files))
        self._remove_index(name)
        try:
            for file, facts in index.files.items():
                self._put(folder, name, file, facts)
            self._remote.pipe_file(self._at(name, INDEX), json.dumps(asdict(index)).encode())
        except BaseException:
            with suppress(Exception):
                self._remove(name)
            raise

    def prune(self, keep: int, best: Collection[str]) -> None:
        """Remove the run's checkpoints but the newest `keep` (-1: all) and the best, also half uploaded ones."""
        if keep == -1:
            return
        kept = {*[name for name in self.saved() if name in self._own][:keep], *best}
        for name in self._own.intersection(self.names()) - kept:
            self._remove(name)
        self._remote.invalidate_cache()

    def download(self, index: Index, name: str, into: Path, only: str = "") -> None:
        """Download a checkpoint with the run's record, and verify each file.

        The folder exists; `only` is a prefix of the paths of the files to download.

        Raises:
            ValueError: a file does not match the index.
            OSError: the disk has no room for it, or a file is missing there.
        """
        wanted = {file: facts for file, facts in index.files.items() if file.startswith(only)}
        size = sum(facts["size"] for facts in wanted.values())
        if size > (free := shutil.disk_usage(into).free):
            raise OSError(f"it has {size:,} bytes, and {free:,} are free in {into}")
        for file, facts in wanted.items():
            (into / file).parent.mkdir(parents=True, exist_ok=True)
            with self._open(self._at(name, file)) as source, (into / file).open("xb") as target:
                if _copy(source, facts["size"], target) != facts:
                    raise ValueError(f"{file} differs from its {INDEX}")

    def _put(self, folder: Path, name: str, file: str, facts: Mapping[str, Any]) -> None:
        path = self._at(name, file)
        self._remote.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._remote.put_file(str(folder / file), path)
        self._remote.invalidate_cache()
        with self._open(path) as source:
            if _copy(source, facts["size"]) != facts:
                raise OSError(f"{file} differs from what was uploaded")

    def _remove(self, name: str) -> None:
        self._remove_index(name)
        self._remote.rm(self._at(name), recursive=True)
        self._own.discard(name)

    def _remove_index(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._remote.rm_file(self._at(name, INDEX))

    def _open(self, path: str) -> Any:
        is_local = "file" in self._remote.protocol
        return open_regular(path) if is_local else self._remote.open(path, "rb")

    def _at(self, *parts: str) -> str:
        return "/".join([self._path, *filter(None, parts)])


def stage(run_dir: Path, checkpoint: str, into: Path) -> None:
    """Link the files to upload for a checkpoint into a folder, where they survive changes to the originals.

    Raises:
        OSError: the folder cannot be made.
    """
    shutil.rmtree(into, ignore_errors=True)
    for name in (checkpoint, *UPLOADED):
        source = run_dir / name
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, into / name, copy_function=link_or_copy, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif source.is_file():
            link_or_copy(str(source), str(into / name))


def _facts(folder: Path, checkpoint: str, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return size and hash of each file in a folder; those of the checkpoint are the ones with which it was written."""
    found = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = path.relative_to(folder).as_posix()
        facts = known.get(name.removeprefix(f"{checkpoint}/")) if name.startswith(f"{checkpoint}/") else None
        if facts is None:
            with path.open("rb") as file:
                facts = _copy(file, path.stat().st_size)
        found[name] = {"size": facts["size"], "sha256": facts["sha256"]}
    return found


def _copy(source: Any, size: int, target: Any = None) -> dict[str, Any]:
    """Read a file, to `target` if given, but little more than the size it should have; return its size and hash."""
    digest = hashlib.sha256()
    read = 0
    while read <= size and (block := source.read(min(BLOCK, size + 1 - read))):
        digest.update(block)
        read += len(block)
        if target is not None:
            target.write(block)
    return {"size": read, "sha256": digest.hexdigest()}


def _is_inside(name: Any) -> bool:
    """Return whether a name is a path that stays in a folder, without hidden parts."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    parts = name.split("/")
    return PurePosixPath(name).as_posix() == name and not any(one.startswith(".") or not one for one in parts)
