"""Callbacks and algorithms that reduce weights handle sharded tensors.

The norm of a sharded weight is silently that of the local shard. So each function that reduces weights uses `local` or
`whole` of `runner.distributed.sharding`, or `FINE` says why it need not.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REDUCTIONS = {
    *("norm", "vector_norm", "matrix_norm", "_foreach_norm", "get_total_norm", "clip_grad_norm_", "clip_grad_value_"),
    *("sum", "nansum", "mean", "nanmean", "std", "var", "prod", "cumsum", "logsumexp", "median"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "all", "any", "count_nonzero", "item", "tolist"),
}
AWARE = {"local", "whole"}
WEIGHTS = {"parameters", "named_parameters", "grad", "param_groups", "gradients", "moments"}
"""A function that uses one of these names handles weights."""
NORMS = {name for name in REDUCTIONS if "norm" in name or "clip" in name}

FINE = {
    "algorithms/_stochastic_block.py:forward": "runs in the forward pass of an FSDP unit, where the weights are whole",
    "algorithms/gradient_clipping.py:after_train_batch": "calls torch functions that reduce over ranks",
    "algorithms/gradient_clipping.py:unit_norms": "calls an operation that DTensor supports, tested in test_sharding",
    "algorithms/sam.py:ascend": "SAM refuses sharded models",
    "algorithms/spike_guard.py:after_train_batch": "SpikeGuard refuses sharded models",
    "algorithms/nan_guard.py:all_finite": "checks local parts, and combines the answers of all ranks",
    "algorithms/ghost_batch_norm.py:normalize_in_chunks": "runs in the forward pass of an FSDP unit",
    "callbacks/activation_monitor.py:statistics": "reduces activations, which are not sharded",
    "callbacks/optimizer_monitor.py:_measure": "reduces norms that l2_norms has gathered",
}


def functions() -> dict[str, ast.FunctionDef]:
    """Return the functions of callbacks and algorithms, by 'file:name'."""
    nodes = {}
    for folder in ("callbacks", "algorithms"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    nodes[f"{path.relative_to(ROOT)}:{node.name}"] = node
    return nodes


def names_in(node: ast.AST) -> set[str]:
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def reductions_in(node: ast.AST) -> set[str]:
    """Return the reductions called, such as `x.sum()`, but neither `sum(list)` nor a layer such as `self.norm(x)`."""
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    names = [call.attr for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call.value) != "self"]
    names += [call.id for call in calls if isinstance(call, ast.Name) and "norm" in call.id]
    return REDUCTIONS.intersection(names)


def is_suspect(node: ast.FunctionDef) -> bool:
    """Return whether a function computes a norm or reduces weights without `local` or `whole`."""
    reductions = reductions_in(node)
    about_weights = bool(reductions) and bool(names_in(node) & WEIGHTS)
    return (bool(reductions & NORMS) or about_weights) and not names_in(node) & AWARE


def test_each_reduction_of_weights_handles_shards_or_is_listed():
    suspects = {name for name, node in functions().items() if is_suspect(node)}
    assert suspects == {*FINE}, "use local or whole of runner.distributed.sharding, or say in FINE why it need not"


def test_a_norm_of_weights_without_whole_is_suspect():
    function = ast.parse("def f(model):\n    return [weight.norm() for weight in model.parameters()]").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert is_suspect(function)
    aware = ast.parse("def f(model):\n    return [whole(weight).norm() for weight in model.parameters()]").body[0]
    assert isinstance(aware, ast.FunctionDef)
    assert not is_suspect(aware)
