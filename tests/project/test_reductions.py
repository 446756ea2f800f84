"""Whatever adds up elements in callbacks and algorithms knows of sharded tensors, of which a rank holds only a part.

The norm of a sharded weight is that of its local part, without an error. So each function that reduces tensors either
goes through `local` or `whole` of `runner.distributed.sharding`, or stands here with the reason why it need not.
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
"""Names that say a function handles weights."""
NORMS = {one for one in REDUCTIONS if "norm" in one or "clip" in one}

FINE = {
    "algorithms/_stochastic_block.py:forward": "inside a unit's forward pass, where its weights are whole",
    "algorithms/gradient_clipping.py:after_train_batch": "torch's own functions, which reduce over ranks",
    "algorithms/gradient_clipping.py:unit_norms": "stays sharded, as an operation of DTensors; in test_sharding",
    "algorithms/sam.py:ascend": "refused for sharded models",
    "algorithms/nan_guard.py:all_finite": "of local parts, and the ranks join their answers",
    "algorithms/ghost_batch_norm.py:normalize_in_chunks": "inside a unit's forward pass",
    "callbacks/activation_monitor.py:statistics": "of activations, which are no shards",
    "callbacks/optimizer_monitor.py:_measure": "of norms that l2_norms has gathered",
}


def functions() -> dict[str, ast.FunctionDef]:
    """Each function of callbacks and algorithms, by 'file:name'."""
    found = {}
    for folder in ("callbacks", "algorithms"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = node
    return found


def names_in(node: ast.AST) -> set[str]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def reductions_in(node: ast.AST) -> set[str]:
    """Calls that reduce: `x.sum()`, `torch.sum(x)`; not `sum(list)`, and not a layer, `self.norm(x)`."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    methods = [one for one in calls if isinstance(one, ast.Attribute) and ast.unparse(one.value) != "self"]
    names = [one.attr for one in methods] + [one.id for one in calls if isinstance(one, ast.Name) and "norm" in one.id]
    return REDUCTIONS.intersection(names)


def is_suspect(node: ast.FunctionDef) -> bool:
    """Whether a function takes a norm, or reduces while it handles weights, and knows nothing of shards."""
    reductions = reductions_in(node)
    about_weights = bool(reductions) and bool(names_in(node) & WEIGHTS)
    return (bool(reductions & NORMS) or about_weights) and not names_in(node) & AWARE


def test_each_reduction_knows_of_shards():
    suspects = {name for name, node in functions().items() if is_suspect(node)}
    assert suspects == {*FINE}, "use local or whole of runner.distributed.sharding, or say in FINE why it need not"


def test_a_norm_of_weights_is_suspect():
    function = ast.parse("def f(model):\n    return [one.norm() for one in model.parameters()]").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert is_suspect(function)
    aware = ast.parse("def f(model):\n    return [whole(one).norm() for one in model.parameters()]").body[0]
    assert isinstance(aware, ast.FunctionDef)
    assert not is_suspect(aware)
