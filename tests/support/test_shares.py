"""How tests are divided among workers."""

from __future__ import annotations

import pytest
from shares import deal


def test_no_test_of_this_run_is_lost(request: pytest.FixtureRequest):
    items = request.session.items
    assert sorted(item.nodeid for item in deal(items, 3)) == sorted(item.nodeid for item in items)
