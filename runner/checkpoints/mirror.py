"""A run's checkpoints at an address: each is uploaded atomically, and verified after upload and download.

    <address>/mirror.json                      the owner, a run, and its checkpoints: only these are ever removed
              <checkpoint>/index.json          names, sizes and hashes of the other files; written last
                           config.yaml ...     the run's record
                           checkpoints/<checkpoint>/model.pt ...

Each is laid out like a run's folder with a single checkpoint: all that another machine needs to continue. Files at an
address may come from anyone: paths that lead elsewhere and files that differ from their hashes are refused.
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
LARGEST_RECORD = 100_000_000  # bytes of a file outside the checkpoint
BLOCK = 1 << 20  # bytes read at a time
OWNER = "mirror.json"
UPLOADED = (*RECORD, CODE, "mlflow/run.json", OWNER)  # the last two identify its MLflow run and its mirror
"""Files and folders of a run that are uploaded with each checkpoint."""


@dataclass(frozen=True)
class Index:
    """The index of one checkpoint at an address.

    Attributes:
        checkpoint: path of the checkpoint in the run's folder, such as `checkpoints/ep2-ba64`.
        saved_at: time of writing, in seconds since 1970.
        best: names of the run's best checkpoints at that time, best first.
        files: size and SHA-256 of each file, by its path in the run's folder.
    """

    checkpoint: str
    saved_at: float
    best: list[str]
    files: dict[str, dict[str, Any]]
    format: int = FORMAT

    @classmethod
    def read(cls, text: bytes) -> Index:
        """Return the index in the text of a file; raise ValueError if it is not valid."""
        try:
            index = cls(**json.loads(text))
            names = [index.checkpoint, *index.best, *index.files]
            for value in (index.format, index.saved_at, *(facts["size"] for facts in index.files.values())):
                number(value)
        except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
            raise ValueError(f"its {INDEX} cannot be read ({error})") from None
        if index.format > FORMAT:
            raise ValueError(f"a later version of this project wrote it (format {index.format})")
        for name in names:
            if not _is_inside(name):
                raise ValueError(f"its {INDEX} names {name!r}, which leads out of its folder")
        for name, facts in index.files.items():
            if not name.startswith(f"{index.checkpoint}/") and facts["size"] > LARGEST_RECORD:
                raise ValueError(f"its {name} has {facts['size']:,} bytes, at most {LARGEST_RECORD:,} are allowed")
        for name in (index.name, *index.best):
            if not is_name(name):
                raise ValueError(f"its {INDEX} names {name!r}, which is not a valid name for a checkpoint")
        return index

    @property
    def name(self) -> str:
        """Name of the checkpoint, such as `ep2-ba64`."""
        return PurePosixPath(self.checkpoint).name


class Mirror:
    """The checkpoints of one run at an address. All methods block while they access it.

    Args:
        address: the run's own folder, such as `s3://bucket/runs/NAME`.

    Raises:
        Exception: the file system cannot be reached; each file system has its own errors.
    """

    def __init__(self, address: str) -> None:
        self._remote, self._path = open_address(address)
        self._owner = ""
        self._own: set[str] = set()  # names of the checkpoints that the owner has uploaded

    def claim(self, owner: str, overwrite: bool) -> None:
        """Claim the folder for a run, before the first upload.

        Args:
            owner: ID of the run. The folder must be new, empty, or already this run's.
            overwrite: whether the folder may also be another run's.

        Raises:
            FileExistsError: the folder holds other files.
            ValueError: the `mirror.json` in it cannot be read.
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
        """Return the index of each complete checkpoint by name, newest first.

        Args:
            report: called with the name of each checkpoint that cannot be used, and its error.
        """
        indexes = {}
        for name in self.names():
            try:
                indexes[name] = self.read_index(name)
            except FileNotFoundError:
                pass  # its upload was interrupted
            except ValueError as error:
                report(name, error)
        return dict(sorted(indexes.items(), key=lambda item: item[1].saved_at, reverse=True))

    def names(self) -> list[str]:
        """Return the names of all folders at the address that may be checkpoints, complete or not."""
        self._remote.invalidate_cache()
        try:
            entries = self._remote.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return [*filter(is_name, names)]

    def read_index(self, name: str = "") -> Index:
        """Return the index of a checkpoint; without a name, the address itself is the checkpoint.

        Raises:
            FileNotFoundError: the checkpoint does not exist or is incomplete.
            ValueError: it cannot be used.
        """
        with self._open(self._at(name, INDEX)) as file:
            index = Index.read(file.read(LARGEST_INDEX))
        if name not in ("", index.name):
            raise ValueError(f"it holds the checkpoint {index.name!r} under another name")
        return index

    def upload(self, folder: Path, name: str, checkpoint: str, best: Sequence[str]) -> None:
        """Upload a folder as one checkpoint, replacing the run's earlier one of that name, and read it back.

        On failure, the uploaded files are removed, if possible, because the next checkpoint needs their space.

        Args:
            folder: a run's folder with one checkpoint; it must not change during the upload.
            name: name of the checkpoint at the address.
            checkpoint: path of the checkpoint in the folder.
            best: names of the run's best checkpoints, best first.

        Raises:
            FileExistsError: the address has a folder of that name that the run has not uploaded.
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
        """Remove the run's checkpoints, even incomplete ones, except the newest `keep` (-1: all) and the best."""
        if keep == -1:
            return
        kept = {*[name for name in self.saved() if name in self._own][:keep], *best}
        for name in self._own.intersection(self.names()) - kept:
            self._remove(name)
        self._remote.invalidate_cache()

    def download(self, index: Index, name: str, into: Path, only: str = "") -> None:
        """Download a checkpoint with the run's record into an existing folder, and verify each file.

        `only` is a prefix of the paths of the files to download.

        Raises:
            ValueError: a file does not match the index.
            OSError: the disk has too little space, or a file is missing at the address.
        """
        files = {file: facts for file, facts in index.files.items() if file.startswith(only)}
        size = sum(facts["size"] for facts in files.values())
        if size > (free := shutil.disk_usage(into).free):
            raise OSError(f"it has {size:,} bytes, and {free:,} are free in {into}")
        for file, facts in files.items():
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
    """Link the files to upload for a checkpoint into a folder, so that they survive changes to the originals.

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
    """Return the size and hash of each file in a folder; for those of the checkpoint, from its manifest (`known`)."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        facts = known.get(name.removeprefix(f"{checkpoint}/")) if name.startswith(f"{checkpoint}/") else None
        if facts is None:
            with path.open("rb") as file:
                facts = _copy(file, path.stat().st_size)
        files[name] = {"size": facts["size"], "sha256": facts["sha256"]}
    return files


def _copy(source: Any, size: int, target: Any = None) -> dict[str, Any]:
    """Read a file, at most one byte beyond its expected size, and copy it to `target`; return its size and hash."""
    digest = hashlib.sha256()
    read = 0
    while read <= size and (block := source.read(min(BLOCK, size + 1 - read))):
        digest.update(block)
        read += len(block)
        if target is not None:
            target.write(block)
    return {"size": read, "sha256": digest.hexdigest()}


def _is_inside(name: Any) -> bool:
    """Return whether a name is a relative path that stays in its folder, without hidden parts."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    parts = name.split("/")
    return PurePosixPath(name).as_posix() == name and not any(part.startswith(".") or not part for part in parts)
