"""Whether a run's record may be used: making objects of a config runs code, so somebody else's may not name any class.

Records are signed with a secret of the user who made them. One without a valid signature may name what ships with this
project, and what its reader allows.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runner.composed import targets
from runner.records.kept_code import read_code
from runner.wrong_config import CONF

SIGNED = ("config.yaml", "overrides.yaml")
"""Files of a record that say what is run; the modules that are kept with it are signed too."""

_HARMLESS = re.compile(
    r"(runner|callbacks|algorithms|torch\.(nn|optim|optim\.lr_scheduler)|torchmetrics(\.[a-z]+)?)\.[A-Z]\w*"
)
"""Classes that a record may name besides those that stand in `conf/`; not all of torch, which can also run files."""

log = logging.getLogger("runner")


def sign(contents: Sequence[bytes]) -> str | None:
    """Return the signature of this user under the files named in `SIGNED`; None, with a warning, without a key."""
    try:
        key = _user_key()
    except (OSError, RuntimeError) as error:
        log.warning("the record is not signed, so resume= and rerun= will ask for classes of your own: %s", error)
        return None
    lengths = b"".join(len(one).to_bytes(8) for one in contents)
    return hmac.new(key, lengths + b"".join(contents), hashlib.sha256).hexdigest()


def signed_code(modules: Mapping[str, bytes]) -> list[bytes]:
    """Return what is signed of the modules that are kept with a run: their names and contents."""
    return [part for name in sorted(modules) for part in (name.encode(), modules[name])]


def is_own(folder: Path) -> bool:
    """Whether this user made the record in a folder, and nobody has changed it since."""
    try:
        given = (folder / "signature").read_bytes()
        signature = sign([*((folder / name).read_bytes() for name in SIGNED), *signed_code(read_code(folder))])
    except OSError:
        return False
    return signature is not None and hmac.compare_digest(given, signature.encode())


def check_targets(folder: Path, configs: Sequence[Any], allowed: Sequence[str]) -> None:
    """Raise where a record that this user did not make names what is not of this project. Nothing is imported.

    Args:
        folder: of the record.
        configs: all that will be made of it, in plain containers.
        allowed: names, as far as `*` goes patterns, that the user allows.

    Raises:
        ValueError: all that is not allowed, and how to allow it.
    """
    if is_own(folder):
        return
    shipped = {match for file in CONF.rglob("*.yaml") for match in re.findall(r"_target_: *(\S+)", file.read_text())}
    names = {str(section["_target_"]) for config in configs for _, section in targets(config)}
    # An interpolation is resolved when objects are made, and could bring a target of its own; a record has none.
    names |= {one for one in _strings(configs[0]) if "${" in one}
    unknown = sorted(
        one
        for one in names - shipped
        if not _HARMLESS.fullmatch(one) and not any(fnmatchcase(one, pattern) for pattern in allowed)
    )
    if unknown:
        raise ValueError(
            f"{folder / 'config.yaml'}: this run was made by someone else, or on another machine, and uses what is not "
            f"of this project: {', '.join(unknown)}. That would run with your rights: read the file, and if you trust "
            f"it, add 'allow_targets=[{','.join(unknown)}]'"
        )


def _strings(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        config = [*config.keys(), *config.values()]
    if isinstance(config, list):
        for one in config:
            yield from _strings(one)
    elif isinstance(config, str):
        yield config


def _user_key() -> bytes:
    """Return the secret of this user, made at the first call.

    Raises:
        OSError, RuntimeError: there is no home folder that can be written to.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(base) / "experiment-runner" / "key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".key.{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):  # of another process, a moment ago
            os.link(partial, path)
        partial.unlink()
    key = path.read_bytes()
    if len(key) < 32:
        raise OSError(f"{path} holds no key; remove it")
    return key
