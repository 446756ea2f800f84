"""Failures of deliveries to MLflow, in one line and without credentials."""

from __future__ import annotations

import sys
import traceback

import requests

from runner.files.addresses import without_credentials, without_those_of


def print_trace(tracking_uri: str = "") -> None:
    """Print the trace of the current exception to stderr, without credentials such as those of the address."""
    print(without_those_of(tracking_uri, traceback.format_exc()), file=sys.stderr, flush=True)


class Deleted(Exception):
    """Raised for a run or experiment that was deleted in MLflow and accepts no data until it is restored.

    Its data stay in the register of unsent runs until then.
    """


def explain(error: Exception, tracking_uri: str) -> str:
    """Return what went wrong in one line, without the HTTP client's layers if the server was not reached."""
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
