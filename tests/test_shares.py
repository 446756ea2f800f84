"""How tests are dealt out to workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from shares import deal


def test_each_share_begins_with_the_files_that_start_processes():
    def file(name: str, tests: int, *fixtures: str) -> list[Any]:
        return [SimpleNamespace(path=name, number=number, fixturenames=fixtures) for number in range(tests)]

    items = [*file("a", 3), *file("b", 2, "run_app"), *file("c", 1), *file("d", 1, "tmp_path", "sessions")]
    dealt: list[Any] = [*deal(items, 2)]
    assert [f"{item.path}{item.number}" for item in dealt] == ["b0", "b1", "c0", "d0", "a0", "a1", "a2"]


def test_no_test_of_this_run_is_lost(request: pytest.FixtureRequest):
    items = request.session.items
    assert sorted(item.nodeid for item in deal(items, 3)) == sorted(item.nodeid for item in items)
