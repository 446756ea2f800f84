"""Digests of a run: short hashes of its state, for comparing two runs bit by bit.

Equal states have equal digests on any device and in any process; states that differ in one bit have different ones.
torch is imported only to hash a state, so that comparing files of digests starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.files.whole import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from runner.core.state import State

DIGESTS = "digests.jsonl"
PARTS = ("samples", "content", "randomness", "loss", "gradients", "weights", "optimizer", "algorithms")
"""Parts of a run whose digests a line may hold, in causal order; the callback `StateDigest` describes each."""
NAMED = ("gradients", "weights", "optimizer")
"""Parts of which a line may also hold a digest for each tensor, under 'tensors'."""
LOOP = "loop"
"""In a line: 'own' if `runner.Recorder` wrote it in a loop that is not the Trainer's."""
IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of an optimizer's parameter group that change no result, or only its last bits."""
MEASURED = ("loss", "gradients", "weights")
"""Parts for which a line also holds a number, under 'values'."""


def digest_state(state: State) -> dict[str, str]:
    """Return digests of this rank's state by part, except `samples`; call it after a batch and before evaluations.

    Sharded tensors are gathered, so call it on all ranks if the model is sharded.
    """
    import torch

    from runner.checkpoints.hashing import digest

    generators = [torch.get_rng_state()]
    if state.device.type == "cuda":
        generators.append(torch.cuda.get_rng_state(state.device))
    elif state.device.type != "cpu":
        generators.append(getattr(torch, state.device.type).get_rng_state())
    parts = {
        "content": state.batch,
        "randomness": generators,
        "loss": getattr(state, "total_loss", None),  # missing before the first batch
        "gradients": {name: weight.grad for name, weight in state.unwrapped_model.named_parameters()},
        "weights": state.unwrapped_model.state_dict(keep_vars=True),  # detaching them would take as long as hashing
        "optimizer": [
            [item.state_dict() for item in (*state.optimizers, *state.schedulers)],
            state.scaler.state_dict() if state.scaler is not None else None,
        ],
        "algorithms": {algorithm.config_key: algorithm.state_dict() for algorithm in state.algorithms},
    }
    return {name: digest(part) for name, part in parts.items()}


def digest_tensors(state: State) -> dict[str, dict[str, Any]]:
    """Return short digests by name: of gradients, weights, optimizer states, and the optimizer settings of each weight.

    Names leave out the prefix that all names of a model share, such as DDP's `module.`, so that models in different
    wrappers can be compared. Sharded tensors are gathered, so call it on all ranks if the model is sharded. Each tensor
    is copied to the host on its own.
    """
    from runner.checkpoints.hashing import digest

    weights = dict(state.unwrapped_model.named_parameters())
    wrapper = _shared_prefix([*weights])

    def short(named: Mapping[str, Any]) -> dict[str, str]:
        return {name: digest(value)[:8] for name, value in named.items()}

    def bare(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(wrapper): value for name, value in named.items()}

    names = {weight: name.removeprefix(wrapper) for name, weight in weights.items()}
    optimized: dict[str, str] = {}
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in IMPLEMENTATION}
            of_group = short({key: value for key, value in settings.items() if _has_digest(value)})
            for weight in group["params"]:
                name = names.get(weight, "unknown")
                values = {key: value for key, value in optimizer.state.get(weight, {}).items() if _has_digest(value)}
                optimized |= {f"{name}/{key}": value for key, value in (short(values) | of_group).items()}
    return {
        "gradients": short(bare({name: weight.grad for name, weight in weights.items()})),
        "weights": short(bare(state.unwrapped_model.state_dict(keep_vars=True))),
        "optimizer": optimized,
    }


def _shared_prefix(names: Sequence[str]) -> str:
    """Return the dotted prefix that all names share; it never includes the last part of a name."""
    folders = [name.rpartition(".")[0].split(".") for name in names]
    shared = takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))
    return "".join(f"{part}." for part, *_ in shared if part)


def _has_digest(value: Any) -> bool:
    return hasattr(value, "dtype") or isinstance(value, int | float | tuple | list)


def measure_state(state: State) -> dict[str, float]:
    """Return the loss of this rank's last batch, and the norms of its gradients and weights.

    This waits for the device. Sharded tensors are gathered, so call it on all ranks if the model is sharded.
    """
    weights = [*state.unwrapped_model.parameters()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return dict(zip(MEASURED, (float(state.total_loss), norm(gradients), norm(weights)), strict=True))


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all elements of some tensors; sharded ones are gathered one at a time."""
    import torch

    from runner.device.numbers import numbers_of
    from runner.distributed.sharding import any_sharded, whole

    tensors = [*tensors]
    if not tensors:
        return 0.0
    supported = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    can_fuse = {tensor.dtype for tensor in tensors} <= supported and len({tensor.device for tensor in tensors}) == 1
    with torch.no_grad():
        if any_sharded(tensors) or not can_fuse:  # for example, frozen 8-bit weights
            return sum(float(numbers_of(whole(tensor)).double().norm()) ** 2 for tensor in tensors) ** 0.5
        numbers = [*map(numbers_of, tensors)]
        norms = torch._foreach_norm(numbers, 2, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        return sum(value**2 for value in torch.stack([*norms]).tolist()) ** 0.5


def read_digests(path: str | Path) -> list[dict[str, Any]]:
    """Return the entries of a file of digests, one for each batch; truncated and invalid lines are skipped.

    Raises:
        FileNotFoundError: `path` is neither a file of digests nor the folder of a run that has one.
    """
    path = Path(path)
    path = path / DIGESTS if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"path={str(path)!r}: no digests there; a run writes them with +callbacks=state_digest")
    entries = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("batch"), int):
            entries.append(entry)
    return entries


def append_digests(path: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry to a file of digests."""
    with path.open("a") as file:
        file.write(_to_line(entry))


def truncate_digests(path: Path, batch: int) -> None:
    """Remove the entries after a batch from a file of digests, by replacing the file."""
    write_atomically(path, "".join(_to_line(entry) for entry in read_digests(path) if entry["batch"] <= batch))


def _to_line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


class DigestComparison(NamedTuple):
    """How far two runs agree, among the batches for which both have digests."""

    agreed: int
    """The last batch up to which they agree, counted from 1; 0 if they differ at the first one compared."""
    batch: int | None
    """The first batch after which they differ; None if they never do."""
    parts: tuple[str, ...]
    """The parts (see `PARTS`) that differ after that batch; empty if nothing differs."""


def first_difference(a: str | Path, b: str | Path, parts: Iterable[str] = PARTS) -> DigestComparison:
    """Return the batch and the parts in which two runs first differ, or the batch up to which they agree.

    Each run is given as its folder or its file of digests. Runs on different numbers of ranks can only agree in
    `samples`. If `runner.Recorder` wrote one of them, only parts that both have are compared, tensors by name, and
    generators only if it wrote both, because the Trainer draws its random numbers differently.

    Raises:
        ValueError: there is no batch for which both runs have digests.
        FileNotFoundError: one of the runs has no digests.
    """
    entries_b = {entry["batch"]: entry for entry in read_digests(b)}
    pairs = [(entry, entries_b[entry["batch"]]) for entry in read_digests(a) if entry["batch"] in entries_b]
    if not pairs:
        raise ValueError(f"{str(a)!r} and {str(b)!r} have digests of no batch in common: give both the same interval")
    agreed = 0
    for entry_a, entry_b in pairs:
        differing = tuple(part for part in parts if _differs(entry_a, entry_b, part))
        if differing:
            return DigestComparison(agreed, entry_a["batch"], differing)
        agreed = entry_a["batch"]
    return DigestComparison(agreed, None, ())


def _differs(a: Mapping[str, Any], b: Mapping[str, Any], part: str) -> bool:
    if a.get(part) == b.get(part):
        return False
    loops = a.get(LOOP), b.get(LOOP)
    if loops == (None, None):
        return True
    if part not in a or part not in b or (part == "randomness" and loops[0] != loops[1]):
        return False
    return bool(_differing(a, b, part)) if part in NAMED else True


def differing_tensors(a: str | Path, b: str | Path, batch: int) -> dict[str, list[str]]:
    """Return the names of the tensors in which two runs differ after a batch, by part.

    It is empty if one of the runs has no digests of individual tensors for that batch.
    """
    first, second = (next(entry for entry in read_digests(path) if entry["batch"] == batch) for path in (a, b))
    return {part: names for part in NAMED if (names := _differing(first, second, part))}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], part: str) -> list[str]:
    """Return the names in a part that differ. Gradients also differ if one of the runs lacks them; others do not."""
    first, second = (dict(entry.get("tensors", {}).get(part, {})) for entry in (a, b))
    names = first.keys() | second.keys() if part == "gradients" and first and second else first.keys() & second.keys()
    return [name for name in {**first, **second} if name in names and first.get(name) != second.get(name)]
