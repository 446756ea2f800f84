"""The order of the tests for the workers contains each test once."""

from __future__ import annotations

import pytest
from shares import deal


def test_deal_keeps_every_test_of_this_run(request: pytest.FixtureRequest):
    items = request.session.items
    assert sorted(item.nodeid for item in deal(items, 3)) == sorted(item.nodeid for item in items)
