"""What MLflow accepts: lengths, characters, and which of its errors are final."""

from __future__ import annotations

import hashlib
import re

import mlflow.exceptions
import requests
from mlflow.store.artifact.artifact_repo import verify_artifact_path

from runner.addresses import without_credentials, without_those_of

METRICS_PER_CALL = 1000
PAIRS_PER_CALL = 100  # parameters or tags
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
DATASET_NAME_LENGTH = 500


class Deleted(Exception):
    """A run or an experiment that was deleted takes nothing until it is restored."""


def run_deleted(run_id: str) -> Deleted:
    """The error of a run that was deleted."""
    return Deleted(f"the run {run_id} is deleted there; restore it in the UI, or go on with it by resume=")


def clean_key(key: str, foreign: str = r"[^/\w.\- :]") -> str:
    """A key that MLflow accepts: what it does not becomes `_`, and a hash of the whole tells it from others.

    The hash depends on the key alone, so that a resumed run goes on under the same one.
    """
    parts = re.sub(foreign, "_", key).split("/")
    cleaned = "/".join("__" if part == ".." else part for part in parts if part not in ("", ".")) or "_"
    if cleaned == key and len(key) <= KEY_LENGTH:
        return key
    return f"{cleaned[: KEY_LENGTH - 9]}_{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def clean_path(name: str) -> str:
    """A name that MLflow accepts for images and tables."""
    return clean_key(name, r"[^/\w.\- ]")


def checked_path(path: str) -> str:
    """Return where a file is to lie among a run's artifacts.

    Raises:
        ValueError: it leads out of them.
    """
    try:
        verify_artifact_path(path)
    except mlflow.exceptions.MlflowException as error:
        raise ValueError(error.message) from error
    return path


def shorten(value: str, length: int) -> str:
    """The text, or its beginning and `...` where it is too long."""
    return value if len(value) <= length else value[: length - 3] + "..."


def is_refusal(error: Exception) -> bool:
    """Whether MLflow was reached and will never take this."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
    if isinstance(error, requests.HTTPError):  # of an artifact
        return error.response is not None and error.response.status_code in (400, 413, 422)
    if isinstance(error, requests.RequestException):  # some of which are ValueErrors
        return False
    # Of an entry that is shaped otherwise than the trainer's.
    return isinstance(error, ValueError | TypeError | LookupError | AttributeError | FileNotFoundError)


def explain(error: Exception, tracking_uri: str) -> str:
    """What went wrong, in one line: without a HTTP client's layers where the server was not reached at all."""
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    store = without_credentials(tracking_uri)
    if any(isinstance(one, requests.ConnectionError) for one in chain):
        reasons = [one.strerror for one in chain if isinstance(one, OSError) and one.strerror]
        return f"{store} cannot be reached ({reasons[-1] if reasons else 'the connection broke off'})"
    if any(isinstance(one, requests.Timeout) for one in chain):
        return f"{store} does not answer"
    if isinstance(error, Deleted):
        return str(error)
    return f"{type(error).__name__}: {' '.join(without_those_of(tracking_uri, str(error)).split())[:500]}"
