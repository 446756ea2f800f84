"""Sessions of training for the tests of promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from session_processes import Sessions


@pytest.fixture
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    """Starts sessions of training, none of which outlives the test."""
    made = Sessions(tmp_path_factory.mktemp("sessions"))
    try:
        yield made
    finally:
        made.close()
