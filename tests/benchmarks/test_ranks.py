"""benchmarks/ranks.py on two ranks, in short rounds: both loops do the same work, and exceeded limits are detected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_modules import FOLDER, load


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "gpt"])
def test_both_loops_have_the_same_weights_losses_and_outputs(name: str, run_ranks, tmp_path: Path):
    run_ranks(
        f"""
        import sys
        sys.path.append({str(FOLDER)!r})
        import ranks, torch
        from sharded_runs import on_ranks
        with on_ranks():
            torch.save(ranks.measure({name!r}, 2), f"{{torch.distributed.get_rank()}}.pt")
        """
    )
    results = torch.load(tmp_path / "0.pt")
    assert [*results] == ["training", "evaluation", "prediction"]
    for kind, times in results.items():
        assert [*times] == ["hand-written", kind]
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())


def test_a_median_over_the_limit_is_reported(capsys: pytest.CaptureFixture[str]):
    overhead = load("benchmark_of_overhead", "overhead.py")
    times = {"hand-written": [1e-3, 2e-3, 1e-3], "training": [1.03e-3, 2.02e-3, 1.01e-3]}
    assert not overhead.print_ratios(dict(times), {"training": 1.02})
    assert "training: 1.010 times" in capsys.readouterr().out
    times["training"][2] = 1.04e-3
    assert overhead.print_ratios(times, {"training": 1.02})
