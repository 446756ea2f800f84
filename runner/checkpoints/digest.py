"""Digests of a run: short hashes of its state, by which two runs are compared to the bit.

Two equal states have equal digests on any device and in any process; one bit apart, they differ. Imports no torch until
there is a state to hash, so that files of digests can be compared at once.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.files.whole import write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from runner.state import State

FILE = "digests.jsonl"
PARTS = ("samples", "content", "randomness", "weights", "optimizer", "algorithms")
"""What a line of the file may hold digests of; the callback `StateDigest` says what each is."""


def digest(value: Any) -> str:
    """Return a hash of 32 hexadecimal digits of tensors, numbers, strings, lists and dicts, nested as one likes.

    What counts of a tensor is shape, dtype and bits, of a float its bits (0.0 is not -0.0), of a dict no order. Numbers
    of different types are different; a list and a tuple are the same. A tensor of an accelerator is copied to the host.

    Raises:
        TypeError: something else is in it.
    """
    found = hashlib.blake2b(digest_size=16)
    _feed(found.update, value)
    return found.hexdigest()


def digest_state(state: State) -> dict[str, str]:
    """Return digests of what this rank trains with, after a batch and before evaluations, by part but for `samples`."""
    import torch

    generators = [torch.get_rng_state()]
    if state.device.type == "cuda":
        generators.append(torch.cuda.get_rng_state(state.device))
    elif state.device.type != "cpu":
        generators.append(getattr(torch, state.device.type).get_rng_state())
    parts = {
        "content": state.batch,
        "randomness": generators,
        "weights": state.unwrapped_model.state_dict(),
        "optimizer": [
            [one.state_dict() for one in (*state.optimizers, *state.schedulers)],
            state.scaler.state_dict() if state.scaler is not None else None,
        ],
        "algorithms": {one.config_key: one.state_dict() for one in state.algorithms},
    }
    return {name: digest(part) for name, part in parts.items()}


def _feed(update: Callable[[Any], object], value: Any) -> None:
    """Give a value's bits to a hash, each after its type and size, so that no two values give the same."""
    if value is None or isinstance(value, bool | int):
        update(f"{type(value).__name__} {value};".encode())
    elif isinstance(value, float):
        update(b"float " + struct.pack("<d", value))
    elif isinstance(value, str | bytes):
        content = value.encode() if isinstance(value, str) else value
        update(f"{type(value).__name__} {len(content)};".encode() + content)
    elif isinstance(value, Mapping):
        update(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            _feed(update, key)
            _feed(update, value[key])
    elif isinstance(value, Sequence):
        update(f"list {len(value)};".encode())
        for one in value:
            _feed(update, one)
    else:
        _feed_tensor(update, value)


def _feed_tensor(update: Callable[[Any], object], tensor: Tensor) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} has no digest: state is tensors, numbers, strings, lists and dicts")
    update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    # The intended host-device sync: one tensor at a time, so that the host needs no room for all.
    update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())


def read_digests(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a file of digests, by batch; one that was cut off by the end of its run is left out.

    Raises:
        FileNotFoundError: `path` is neither such a file nor the folder of a run that has one.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r}: no digests there; a run writes them with +callbacks=state_digest")
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def append_digests(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line to a file of digests, at once."""
    with path.open("a") as file:
        file.write(_to_line(entry))


def truncate_digests(path: Path, batch: int) -> None:
    """Remove the lines past a batch from a file of digests, all at once."""
    write_whole(path, "".join(_to_line(one) for one in read_digests(path) if one["batch"] <= batch))


def _to_line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


class Comparison(NamedTuple):
    """How far two runs agree, by the batches whose digests both have."""

    agreed: int
    """The last batch up to which they agree, counted from 1; 0: they differ from the first that is compared."""
    batch: int | None
    """The first batch after which they differ, None where they do not."""
    parts: tuple[str, ...]
    """What differs after it: of `PARTS`; empty where nothing does."""


def first_difference(a: str | Path, b: str | Path, parts: Iterable[str] = PARTS) -> Comparison:
    """Return where two runs part, and in what, or up to which batch they agree.

    Args:
        a: the folder of a run with the callback `StateDigest`, or its file of digests.
        b: that of another, whose interval may differ.
        parts: what to compare. On another number of ranks only `samples` are the same.

    Raises:
        ValueError: no batch is in both.
        FileNotFoundError: a run has no digests.
    """
    others = {one["batch"]: one for one in read_digests(b)}
    pairs = [(one, others[one["batch"]]) for one in read_digests(a) if one["batch"] in others]
    if not pairs:
        raise ValueError(f"{str(a)!r} and {str(b)!r} have digests of no batch in common: give both the same interval")
    agreed = 0
    for one, other in pairs:
        differing = tuple(part for part in parts if one.get(part) != other.get(part))
        if differing:
            return Comparison(agreed, one["batch"], differing)
        agreed = one["batch"]
    return Comparison(agreed, None, ())
