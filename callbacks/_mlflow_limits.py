"""What MLflow accepts: lengths, characters, and which of its errors are final."""

from __future__ import annotations

import hashlib
import re

import mlflow.exceptions

METRICS_PER_CALL = 1000
PAIRS_PER_CALL = 100  # parameters or tags
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
DATASET_NAME_LENGTH = 500


def clean_key(key: str) -> str:
    """A key that MLflow accepts: foreign characters become `_`, what exceeds 250 characters becomes a hash."""
    parts = re.sub(r"[^/\w.\- :]", "_", key).split("/")
    cleaned = "/".join("__" if part == ".." else part for part in parts if part not in ("", ".")) or "_"
    if len(cleaned) <= KEY_LENGTH:
        return cleaned
    return f"{cleaned[: KEY_LENGTH - 9]}_{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def clean_path(name: str) -> str:
    """A name that MLflow accepts for images and tables."""
    return clean_key(name).replace(":", "_")


def shorten(value: str, length: int) -> str:
    """The text, or its beginning and `...` where it is too long."""
    return value if len(value) <= length else value[: length - 3] + "..."


def is_refusal(error: Exception) -> bool:
    """Whether MLflow was reached and will never take this."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
    return isinstance(error, ValueError | TypeError | FileNotFoundError)
