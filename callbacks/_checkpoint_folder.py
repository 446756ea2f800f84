"""Manages a run's checkpoints on disk: registers them, moves the links, and deletes old ones."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Timestamp
from runner.checkpoints.manifest import is_name
from runner.failures.checks import check_inner_path
from runner.failures.errors import wrong_argument
from runner.files.addresses import without_credentials

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CheckpointFolder:
    """A folder of named checkpoints with the links `latest` and `best`. Only the newest and best checkpoints are kept.

    `keep=-1` keeps all checkpoints. The folder is created on the first write.
    """

    def __init__(self, path: Path, keep: int, keep_best: int) -> None:
        self.path = path
        self.keep = keep
        self.keep_best = keep_best
        self.saved: list[str] = []
        """Names of the checkpoints, oldest first."""
        self.best: list[tuple[float, str]] = []
        """Pairs of score and name, best first; a lower score is better."""
        self._before = self.saved, self.best

    @property
    def latest(self) -> Path | None:
        """Path of the newest complete checkpoint, or None if there is none yet."""
        link = self.path / "latest"
        return link.resolve() if link.exists() else None

    def add(self, name: str, score: float | None) -> None:
        """Register a checkpoint that is about to be written.

        Call this before capturing the run's state, so that a resumed run knows the checkpoint it came from. An
        existing checkpoint of that name is replaced. The lowest score is the best; None means never the best.
        """
        self._before = self.saved, self.best
        self.saved = [*(saved for saved in self.saved if saved != name), name]
        self.best = [pair for pair in self.best if pair[1] != name]
        if score is not None:
            self.best = sorted([*self.best, (score, name)], key=lambda pair: pair[0])[: self.keep_best]

    def write(self, snapshot: dict[str, Any], name: str, group: ProcessGroup | None = None) -> None:
        """Write a registered checkpoint, move the links to it, and delete checkpoints that are no longer kept.

        Call it on rank 0; for a sharded snapshot on all ranks, which synchronize in `group`.

        Raises:
            OSError: a write failed. If the checkpoint does not exist, its registration is undone.
        """
        from runner import write_checkpoint

        def publish() -> None:
            self._link("latest", name)
            if self.best:
                self._link("best", self.best[0][1])
            self._prune()

        try:
            write_checkpoint(snapshot, self.path / name, group, before=self._remove_leftovers, after=publish)
        except OSError:
            if not (self.path / name).exists():
                self.take_back()
            raise

    def take_back(self) -> None:
        """Undo the last `add`, for a checkpoint that was not written."""
        self.saved, self.best = self._before

    def check_links(self) -> None:
        """Check that nothing blocks the links `latest` and `best`.

        Raises:
            FileExistsError: a file or folder that is not a link has one of these names.
        """
        for name in ("latest", "best"):
            path = self.path / name
            if path.exists() and not path.is_symlink():
                raise FileExistsError(
                    f"{path} is not a link to a checkpoint, so no checkpoint can be saved here: move it away"
                )

    def forget_missing(self) -> None:
        """Drop checkpoints that the folder lacks, for example after a run was resumed into another folder."""
        self.saved = [name for name in self.saved if self._has(name)]
        self.best = [pair for pair in self.best if pair[1] in self.saved]

    def state_dict(self) -> dict[str, Any]:
        """Return the registered checkpoints."""
        return {"saved": list(self.saved), "best": [list(pair) for pair in self.best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the registered checkpoints. Skip invalid names: someone else may have made the checkpoint."""
        self.saved = [name for name in state["saved"] if is_name(name)]
        self.best = [(float(score), name) for score, name in state["best"] if name in self.saved]

    def _has(self, name: str) -> bool:
        """Return whether a folder of that name, not a link, holds a checkpoint, complete or not."""
        return not (self.path / name).is_symlink() and (self.path / name / "manifest.json").is_file()

    def _link(self, link: str, name: str) -> None:
        # Create the link under another name and rename it, so that it always leads to a complete checkpoint.
        aside = self.path / f".{link}.link"
        aside.symlink_to(name, target_is_directory=True)
        os.replace(aside, self.path / link)

    def _prune(self) -> None:
        from runner import discard

        newest = self.saved if self.keep == -1 else self.saved[-self.keep :]
        kept = {*newest, *(name for _, name in self.best)}
        for name in self.saved:
            if name not in kept and self._has(name):
                discard(self.path / name)
        self.saved = [name for name in self.saved if name in kept]

    def _remove_leftovers(self) -> None:
        """Delete the hidden links and incomplete checkpoints that a crash left behind.

        Other hidden files belong to the user, because `folder` may be the run's own folder or any folder in it.
        """
        for path in self.path.glob(".*-[0-9]*"):
            if re.fullmatch(r"\..+\.(partial|discarded)-\d+", path.name):
                shutil.rmtree(path, ignore_errors=True)
        for link in ("latest", "best"):
            (self.path / f".{link}.link").unlink(missing_ok=True)


def check_names(folder: str, filename: str) -> None:
    """Check the folder of checkpoints and the pattern of their names."""
    check_inner_path("folder", folder or ".", "checkpoints")
    try:
        name = filename.format(**Timestamp()._asdict())
    except (KeyError, IndexError, ValueError):
        fields = ", ".join(f"{{{field}}}" for field in Timestamp._fields)
        raise wrong_argument("filename", filename, f"may have only {fields} in braces") from None
    if not is_name(name) or name == filename:
        raise wrong_argument(
            "filename",
            filename,
            "must be a folder name that differs between checkpoints, such as 'ep{epoch}-ba{batch}'; not "
            "hidden, and without '/'",
        )


def check_alone(savers: Sequence[Any]) -> None:
    """Check that no two savers share a folder or a mirror: each would delete the other's checkpoints."""
    owners: dict[str, str] = {}
    for saver in savers:
        for name, address in (("folder", str(Path(saver.folder))), ("mirror", saver.mirror)):
            if address is not None and (owner := owners.setdefault(address, saver.config_key)) != saver.config_key:
                shown = without_credentials(address)
                raise wrong_argument(
                    name, shown, f"{owner} and {saver.config_key} both save there; give each a different {name}"
                )
