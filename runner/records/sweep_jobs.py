"""Records which runs in a sweep's folder are its jobs: one for each combination, trained with the sweep's config.

The folder may hold other runs: a job continued by hand for longer or with another config, a job of an earlier version
of the config, or a copy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runner.files.names import RESULT
from runner.files.whole import read_object, write_atomically
from runner.records.result import Result, read_result

CLAIMS = ".jobs"  # a folder in a sweep's folder, with a file for each job


class Claim(NamedTuple):
    """The folder of a job, and its identity in the sweep."""

    key: str
    folder: Path
    identity: str

    def result(self) -> Result | None:
        """Return the result of the job; None without one, or if its folder holds another run."""
        result = read_result(self.folder)
        if result is None or result.identity != self.identity:
            return None
        result.name = self.folder.name  # it may have been renamed when it was continued by hand
        return result


def claim(sweep: Path, key: str, folder: Path, identity: str) -> None:
    """Record the folder and the identity of a job, replacing those that it had with another config.

    Raises:
        OSError: the record cannot be written.
    """
    write_atomically(sweep / CLAIMS / key, json.dumps({"folder": folder.name, "identity": identity}))


def claims(sweep: Path, but: Collection[str] = ()) -> Iterator[Claim]:
    """Yield the claims of a sweep's jobs, except those with the keys `but`."""
    for file in sorted(sweep.glob(f"{CLAIMS}/[!.]*")):
        content = read_object(file) if file.name not in but else {}
        if content.keys() >= {"folder", "identity"}:
            yield Claim(file.name, sweep / Path(str(content["folder"])).name, str(content["identity"]))


def drop_claim(sweep: Path, key: str) -> None:
    """Remove the claim of a job, and the folder of claims with the last one."""
    (sweep / CLAIMS / key).unlink(missing_ok=True)
    with suppress(OSError):  # the folder is not empty
        (sweep / CLAIMS).rmdir()


def keep_claims(sweep: Path, identities: Mapping[str, str]) -> None:
    """Remove the claims of jobs that `identities` does not list, or lists with another identity."""
    for claim in [*claims(sweep)]:
        if identities.get(claim.key) != claim.identity:
            drop_claim(sweep, claim.key)


def left_out(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's runs that are not its jobs; an empty list if the sweep has no claims."""
    known = [*claims(sweep)]
    jobs = {job.folder for job in known if job.result() is not None}
    return sorted({path.parent for path in sweep.glob(f"[!.]*/{RESULT}")} - jobs) if known else []
