"""The folder of a run's checkpoints: which it holds, which links point where, which are to go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import Timestamp


class CheckpointFolder:
    """Checkpoints by name, with the links `latest` and `best` beside them; keeps the newest and the best.

    Args:
        path: the folder; made when something is first written to it.
        keep: how many of the newest to keep; -1: all.
        keep_best: how many of the best to keep.
    """

    def __init__(self, path: Path, keep: int, keep_best: int) -> None:
        self.path = path
        self.keep = keep
        self.keep_best = keep_best
        self.saved: list[str] = []
        """Names, oldest first."""
        self.best: list[tuple[float, str]] = []
        """Scores and names, best first; the least is the best."""
        self._before = self.saved, self.best

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint, None before there is one."""
        link = self.path / "latest"
        return link.resolve() if link.exists() else None

    def add(self, name: str, score: float | None) -> None:
        """Count a checkpoint in that is about to be written.

        Done before the run's state is captured, so that a resumed run knows the checkpoint that it came from.

        Args:
            name: of its folder; one of that name is replaced.
            score: the less the better; None: it cannot be the best.
        """
        self._before = self.saved, self.best
        self.saved = [*(one for one in self.saved if one != name), name]
        self.best = [one for one in self.best if one[1] != name]
        if score is not None:
            self.best = sorted([*self.best, (score, name)], key=lambda one: one[0])[: self.keep_best]

    def write(self, snapshot: dict[str, Any], name: str) -> None:
        """Write what was counted in, move the links to it, and remove what need not be kept.

        Raises:
            OSError: it could not be done; a checkpoint that is not there is not counted in any longer.
        """
        from runner import write_checkpoint

        try:
            self._remove_leftovers()
            write_checkpoint(snapshot, self.path / name)
            self._link("latest", name)
            if self.best:
                self._link("best", self.best[0][1])
            self._prune()
        except OSError:
            if not (self.path / name).exists():
                self.take_back()
            raise

    def take_back(self) -> None:
        """Count out again what was counted in last, and is not written."""
        self.saved, self.best = self._before

    def forget_missing(self) -> None:
        """Count out what is not there, as after a resume into another folder."""
        self.saved = [name for name in self.saved if self._holds(name)]
        self.best = [one for one in self.best if one[1] in self.saved]

    def state_dict(self) -> dict[str, Any]:
        """Return what is counted in."""
        return {"saved": list(self.saved), "best": [list(one) for one in self.best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, as far as it can be so: somebody else may have made the checkpoint."""
        self.saved = [name for name in state["saved"] if is_name(name)]
        self.best = [(float(score), name) for score, name in state["best"] if name in self.saved]

    def _holds(self, name: str) -> bool:
        """Return whether this folder itself holds a checkpoint of that name, complete or torn."""
        return not (self.path / name).is_symlink() and (self.path / name / "manifest.json").is_file()

    def _link(self, link: str, name: str) -> None:
        # Made aside and renamed: whoever follows the link finds the old checkpoint or the new one.
        aside = self.path / f".{link}.link"
        aside.symlink_to(name, target_is_directory=True)
        os.replace(aside, self.path / link)

    def _prune(self) -> None:
        from runner import discard

        newest = self.saved if self.keep == -1 else self.saved[-self.keep :]
        kept = {*newest, *(name for _, name in self.best)}
        for name in self.saved:
            if name not in kept and self._holds(name):
                discard(self.path / name)
        self.saved = [name for name in self.saved if name in kept]

    def _remove_leftovers(self) -> None:
        """Remove what a crash left under the hidden names that everything here has before it is complete.

        Other hidden files are the user's: `folder` may be the run's own, or any.
        """
        for pattern in (".*.partial-*", ".*.discarded-*"):
            for path in self.path.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        for link in ("latest", "best"):
            (self.path / f".{link}.link").unlink(missing_ok=True)


def is_name(name: object) -> bool:
    """Whether a checkpoint can have a name: no path, nothing hidden, none of the links."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and "/" not in name
        and not name.startswith(".")
        and name not in ("", "latest", "best")
    )


def check_names(folder: str, filename: str) -> None:
    """Raise unless checkpoints can be named so.

    Raises:
        ValueError: a folder outside of the run's, where no resume would look; a field that `Timestamp` has not, or a
            name that no folder here may have.
    """
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise ValueError(f"folder={folder!r}: must be a path inside the run's folder, such as 'checkpoints'")
    try:
        name = filename.format(**Timestamp()._asdict())
    except (KeyError, IndexError, ValueError):
        fields = ", ".join(f"{{{field}}}" for field in Timestamp._fields)
        raise ValueError(f"filename={filename!r}: may hold {fields} and nothing else in braces") from None
    if not is_name(name) or name == filename:
        raise ValueError(
            f"filename={filename!r}: must be the name of a folder that tells checkpoints apart, such as "
            "'ep{epoch}-ba{batch}'; not hidden, and without '/'"
        )


def check_alone(savers: Sequence[Any]) -> None:
    """Raise where two savers have one folder: each would remove what the other keeps.

    Raises:
        ValueError: they are named.
    """
    owners: dict[Path, str] = {}
    for one in savers:
        if (other := owners.setdefault(Path(one.folder), one.config_key)) != one.config_key:
            raise ValueError(
                f"folder={one.folder!r}: {other} and {one.config_key} both save there; each needs a folder of its own"
            )
