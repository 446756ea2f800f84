"""Messages about unknown names suggest the nearest one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runner.cli.nearest import nearest


@pytest.mark.parametrize(
    ("name", "allowed", "phrase"),
    [
        ("cosine", ["none", "cosine_annealing", "step"], "did you mean 'cosine_annealing'? Allowed: "),
        ("sdg", ["adam", "sgd"], "did you mean 'sgd'? Allowed: adam, sgd"),
        ("zzz", ["b", "a", "_target_"], "allowed: a, b"),
        ("", ["b", "a"], "allowed: a, b"),
        ("name7x", [f"name{i}" for i in range(60)], "did you mean 'name7'?"),
        ("zzz", [f"name{i}" for i in range(60)], "it has many others"),
    ],
)
def test_the_nearest_name_is_suggested(name: str, allowed: Sequence[str], phrase: str):
    assert nearest(name, allowed).startswith(phrase)
    assert "_target_" not in nearest(name, allowed)
