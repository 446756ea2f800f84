"""Where a run comes from: user, host, command, commit and versions, as tags of its MLflow run."""

from __future__ import annotations

import contextlib
import getpass
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def origin_tags(command: Sequence[str], cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags that MLflow's own `create_run` leaves out.

    Args:
        command: what the user typed, the interpreter first.
        cwd: where it was typed; the commit is that of the repository around it.
        run_dir: the run's folder.
    """
    command = [Path(command[0]).name, *command[1:]] if command else []
    tags = {
        "mlflow.source.name": shlex.join(command[1:]) or "python",
        "mlflow.source.type": "LOCAL",
        "command": shlex.join(command),
        "host": platform.node(),
        "python": platform.python_version(),
    }
    with contextlib.suppress(KeyError, OSError):  # a container may run under a number without a name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(PackageNotFoundError):  # a build from source may leave no metadata
        tags["torch"] = version("torch")
    return tags | git_tags(cwd, run_dir)


def git_tags(cwd: str, run_dir: Path) -> dict[str, str]:
    """Return commit, branch and whether the run's code differs from the commit; empty outside of a repository.

    It does where tracked files do, and where the run keeps modules in `code/`, which no commit holds.
    """
    try:
        status = subprocess.run(
            ["git", "--no-optional-locks", "-C", cwd, "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    is_dirty = (run_dir / "code").is_dir() or any(not line.startswith("#") for line in status)
    heads = dict(line[2:].split(" ", 1) for line in status if line.startswith("# branch."))
    return {
        "mlflow.source.git.commit": heads["branch.oid"],
        "mlflow.source.git.branch": heads["branch.head"],
        "mlflow.source.git.dirty": str(is_dirty).lower(),
    }
