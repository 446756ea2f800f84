"""Finds the `conf/` of a user's own project in the working directory, to add it to the runner's.

The runner's files come first: a user's file of the same name is not read, and a message says so.

Composing a config must not run code from the folder. But a file that sets Hydra's own keys can make Hydra import and
call anything, so a folder with such a file is read only if the user types `--config-dir`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.cli.catalogue import OWN
from runner.cli.command_line import config_dir
from runner.terminal.text import print_to_stderr

HARMLESS = {"run", "sweep", "sweeper", "launcher", "mode"}
"""Sections of Hydra's config that take effect when jobs run, not while their configs are composed."""


def find_own_conf(arguments: Sequence[str], conf: Path) -> list[str]:
    """Return a `--config-dir` option for the `conf/` of the working directory, and print that it is read.

    The list is empty if the user typed the option, or if `conf/` has none of the config groups or configures Hydra.
    """
    own = Path(OWN).absolute()
    groups = [*(path.name for path in conf.iterdir() if path.is_dir()), "vars"]
    present = [group for group in sorted(groups) if (own / group).is_dir()]
    if not present or own.resolve() == conf or config_dir(arguments) is not None:
        return []
    for file in sorted(own.rglob("*.yaml")):
        if _configures_hydra(file, own):
            reason = f"{file.relative_to(own.parent)} configures Hydra itself, which can run code"
            print_to_stderr(f"WARNING: {OWN}/ is not read: {reason}; --config-dir {OWN} allows it")
            return []
    names = [file.relative_to(own) for group in present for file in sorted((own / group).glob("*.yaml"))]
    same = [str(name) for name in (Path("config.yaml"), *names) if (own / name).exists() and (conf / name).exists()]
    unread = f", except for files whose names the runner uses: {', '.join(same)}" if same else ""
    advice = "; put the keys of config.yaml into conf/experiment/<name>.yaml" if "config.yaml" in same else ""
    print_to_stderr(f"INFO: {OWN}/ in this folder is read too{unread}{advice}")
    return [f"--config-dir={own}"]


def _configures_hydra(file: Path, folder: Path) -> bool:
    """Return whether a config file may set keys that make Hydra call something during composition."""
    if "hydra" in file.relative_to(folder).parts:
        return True
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        text = file.read_text(encoding="utf-8")
    except Exception:
        return False  # Hydra cannot read it either, and reports that if the file is chosen
    # The file's own package is a comment, so only in its text; one in its defaults may be escaped in the text.
    if re.search(r"@(package\s+)?[\w.]*hydra", f"{text}\n{content}"):
        return True
    section = content.get("hydra", {}) if isinstance(content, dict) else {}
    return not isinstance(section, dict) or not HARMLESS.issuperset(section)
