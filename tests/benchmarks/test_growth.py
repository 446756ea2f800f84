"""benchmarks/growth.py detects costs that grow too fast."""

from __future__ import annotations

from types import ModuleType

import pytest
from benchmark_modules import load


@pytest.fixture(scope="module")
def growth() -> ModuleType:
    return load("benchmark_of_growth", "growth.py")


def test_a_cost_that_grows_faster_than_its_limit_ends_with_code_1(
    growth: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    costs = (
        growth.Cost("flat", "files", (10, 100, 1000), lambda size: 0.002, 0.3),
        growth.Cost("square", "keys", (10, 100, 1000), lambda size: 1e-6 * size**2, 1.1),
    )
    monkeypatch.setattr(growth, "COSTS", costs)
    assert growth.main(["flat"]) == 0
    assert growth.main(["--rounds", "1"]) == 1
    printed = capsys.readouterr().out
    assert "flat: exponent 0.00 (limit 0.3)\n" in printed or "flat: exponent -0.00 (limit 0.3)\n" in printed
    assert "square: exponent 2.00 (limit 1.1)  TOO FAST" in printed and "1,000 keys:   1000.000 ms" in printed


def test_a_shard_in_a_cache_is_measured(growth: ModuleType):
    assert growth.shard_in_cache(40, full=True) > 0 and growth.shard_in_cache(40, full=False) > 0
