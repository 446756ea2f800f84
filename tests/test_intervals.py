"""Intervals in whole runs: due exactly where hand arithmetic says, in every unit, resumed or not, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from interval_runs import Plan, by_hand, draw, train

SEEDS = 40


@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        (Plan("2ep", ["0.1dur"], True, 1), [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]),
        (Plan("2ep", ["0.25dur"], True, 1), [2, 4, 6, 8]),
        (Plan("2ep", ["0.25dur"], False, 1), [4, 8]),  # of epochs whose length nobody knows
        (Plan("8ba", ["0.25dur"], True, 1), [2, 4, 6, 8]),
        (Plan("3ep", ["0.5dur"], True, 1), [6, 12]),
    ],
)
def test_a_fraction_of_the_run_is_due_inside_epochs_too(tmp_path: Path, plan: Plan, batches: list[int]):
    (text,) = plan.intervals
    expected = by_hand(plan, text)
    assert sorted({batch for batch, _ in expected}) == sorted({*batches})
    assert train(plan, tmp_path, resumed=False) == {text: expected}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("seed", [pytest.param(one, marks=[pytest.mark.slow] * (one >= 12)) for one in range(SEEDS)])
def test_each_is_due_where_hand_arithmetic_says(tmp_path: Path, seed: int, resumed: bool):
    plan = draw(seed)
    assert train(plan, tmp_path, resumed) == {text: by_hand(plan, text) for text in plan.intervals}, plan


def train_as_a_rank() -> None:
    """What each rank does: all plans, at once and in two parts."""
    import json
    import sys
    from pathlib import Path

    import torch

    sys.path.append(sys.argv[1])
    from interval_runs import draw, train

    from runner import get_global_rank
    from runner.distributed.collectives import destroy_process_group, init_process_group

    torch.set_num_threads(1)
    init_process_group(torch.device("cpu"))
    seen = [
        [train(draw(seed), Path(f"run{seed}-{resumed}"), resumed) for resumed in (False, True)] for seed in range(10)
    ]
    Path(f"{get_global_rank()}.json").write_text(json.dumps(seen))
    destroy_process_group()


def test_two_ranks_see_them_at_the_same_batches(tmp_path: Path, run_ranks):
    import json

    run_ranks(train_as_a_rank, 2, str(Path(__file__).parent))
    for rank in range(2):
        for seed, both in enumerate(json.loads((tmp_path / f"{rank}.json").read_text())):
            plan = draw(seed)
            expected = {text: [list(one) for one in by_hand(plan, text)] for text in plan.intervals}
            assert both == [expected, expected], (rank, plan)
