"""Explains failures of MLflow in one line, without credentials."""

from __future__ import annotations

from runner.failures.errors import Deleted
from runner.files.addresses import without_credentials, without_credentials_of


def explain(error: Exception, tracking_uri: str) -> str:
    """Return an explanation in one line, without the HTTP client's layers if the server was not reached."""
    import requests

    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    store = without_credentials(tracking_uri)
    if any(isinstance(link, requests.ConnectionError) for link in chain):
        reasons = [link.strerror for link in chain if isinstance(link, OSError) and link.strerror]
        return f"{store} cannot be reached ({reasons[-1] if reasons else 'the connection broke off'})"
    if any(isinstance(link, requests.Timeout) for link in chain):
        return f"{store} does not answer"
    if isinstance(error, Deleted):
        return str(error)
    text = str(error).partition("[SQL:")[0]  # sqlalchemy appends the whole statement
    return f"{type(error).__name__}: {' '.join(without_credentials_of(tracking_uri, text).split())[:500]}"
