import collections
import weakref
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from runner.data import DatasetLoader, collation
from runner.data.collation import LARGE, GrowingBatch

Pair = collections.namedtuple("Pair", ["image", "label"])


class Subclass(torch.Tensor):
    pass


def large(number, shape=(LARGE,), dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel()) + number).to(dtype).view(shape)


def collate(samples):
    growing = GrowingBatch(len(samples))
    return growing.collate([growing.keep(sample) for sample in samples])


def tensors_of(value):
    """Return the tensors in a sample or batch, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in values for tensor in tensors_of(part)]


def describe(value):
    """Return the types, keys and values of a batch, and the layout of its tensors, for comparison."""
    if isinstance(value, torch.Tensor):
        facts = value.dtype, value.shape, value.stride(), value.requires_grad, value._is_view(), value.is_shared()
        return type(value), *facts, value.flatten().tolist()
    if isinstance(value, dict):
        return type(value), [(key, describe(part)) for key, part in value.items()]
    return (type(value), value) if isinstance(value, str) else (type(value), [describe(part) for part in value])


SAMPLES = {
    "a tensor": large,
    "an image and a label": lambda n: (large(n, (3, 128, 192), torch.uint8), n),
    "gray": lambda n: (large(n, (1, 256, 288), torch.uint8), n),
    "many channels": lambda n: large(n, (LARGE, 1, 1)),
    "a list": lambda n: [n, large(n, dtype=torch.int64), "name"],
    "a dict": lambda n: {"pixels": large(n), "name": f"{n}", "label": float(n)},
    "nested": lambda n: ({"views": [large(n), large(-n, dtype=torch.bfloat16)]}, (large(n, (4, LARGE)), n)),
    "large and small": lambda n: (torch.full((3,), n), large(n)),
    "the same tensor twice": lambda n: (large(n),) * 2,
    "a named tuple": lambda n: Pair(large(n), n),
    "an ordered dict": lambda n: collections.OrderedDict(pixels=large(n), label=n),
    "an array": lambda n: (large(n).numpy(), n),
    "a numpy scalar": lambda n: (large(n), numpy.float32(n)),
    "a view of other strides": lambda n: large(n, (256, 256)).T,
    "a row of a larger tensor": lambda n: large(n, (4, LARGE))[1],
    "repeated": lambda n: torch.tensor([n]).expand(LARGE),
    "complex": lambda n: large(n, dtype=torch.complex64).conj(),
    "a subclass": lambda n: large(n).as_subclass(Subclass),
    "a parameter": lambda n: torch.nn.Parameter(large(n)),
    "with a gradient": lambda n: large(n).requires_grad_(),
    "a gradient in one sample": lambda n: large(n).requires_grad_(n == 1),
    "dtypes that differ": lambda n: large(n, dtype=torch.float64 if n == 1 else torch.float32),
    "strides that differ": lambda n: large(n, (256, 256)).T if n == 1 else large(n, (256, 256)),
    "kinds that differ": lambda n: (large(n), n) if n != 1 else [large(n), n],
    "more in later dicts": lambda n: {"a": large(n)} | ({"b": large(n)} if n else {}),
    "orders that differ": lambda n: dict([("a", large(n)), ("b", large(-n))][:: 1 if n else -1]),
    "a tensor that is not copied": lambda n: [
        large(n, (256, 256)).T if n == 1 else large(n, (256, 256)),
        large(n, (256, 256)),
    ],
    "empty": lambda n: torch.zeros(0, 9),
}
REFUSED = {
    "shapes that differ": lambda n: large(n, (LARGE + n,)),
    "lengths that differ": lambda n: (large(n),) * (1 + n),
    "fewer in later dicts": lambda n: {"a": large(n)} | ({} if n else {"b": large(n)}),
    "a tensor and a number": lambda n: n or large(n),
    "None": lambda n: (large(n), None),
    "sparse": lambda n: large(n, (256, 256)).to_sparse(),
    "nested tensors": lambda n: torch.nested.nested_tensor([large(n), large(n)[1:]]),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_batches_equal_those_of_default_collate(name):
    for size in (1, 4):
        samples = [SAMPLES[name](number) for number in range(size)]
        assert describe(collate(samples)) == describe(default_collate(samples))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_errors_equal_those_of_default_collate(name):
    samples = [REFUSED[name](number) for number in range(3)]
    with pytest.raises(Exception) as expected:
        default_collate(samples)
    with pytest.raises(expected.type) as actual:
        collate(samples)
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("name", ["a tensor", "an image and a label", "a dict", "nested", "the same tensor twice"])
def test_large_tensors_are_rows_of_the_batch_as_soon_as_they_are_read(name):
    growing = GrowingBatch(3)
    kept = [growing.keep(SAMPLES[name](number)) for number in range(3)]
    large_batches = [batch for batch in tensors_of(growing.collate(kept)) if batch[0].nbytes >= LARGE]
    rows = [[row for row in tensors_of(sample) if row.nbytes >= LARGE] for sample in kept]
    expected = [[batch[n].data_ptr() for batch in large_batches] for n in range(3)]
    assert [[row.data_ptr() for row in sample] for sample in rows] == expected


def test_collate_functions_registered_by_users_are_used(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda tensors, collate_fn_map: sum(tensors))
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda samples, collate_fn_map: dict(enumerate(samples)))
    assert torch.equal(collate([large(1), large(2)]), large(1) + large(2))
    monkeypatch.undo()
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda samples, collate_fn_map: dict(enumerate(samples)))
    samples = [(large(1), 1), (large(2), 2)]
    batch, expected = collate(samples), default_collate(samples)
    assert all(torch.equal(batch[n][0], expected[n][0]) and batch[n][1] == expected[n][1] for n in range(2))


class Images(Dataset[Any]):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return large(index, (3, 128, 192), torch.uint8), {"label": index}


def add_is_shared(batch):
    return batch, batch[0].is_shared()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_read_into_shared_memory(num_workers, monkeypatch):
    expected = list(DataLoader(Images(), 3))
    for missing in (None, "_new_shared"):
        if missing:
            monkeypatch.setattr(torch.UntypedStorage, missing, None)
        loader = DatasetLoader(Images(), 3, shuffle=False, num_workers=num_workers, transform=add_is_shared)
        pairs = list(loader)
        assert [is_shared for _, is_shared in pairs] == [num_workers > 0] * 3
        assert [batch[0].tolist() for batch, _ in pairs] == [batch[0].tolist() for batch in expected]
        assert [batch[1]["label"].tolist() for batch, _ in pairs] == [[0, 1, 2], [3, 4, 5], [6]]


def test_samples_are_stacked_if_torch_lacks_the_private_functions(monkeypatch):
    for name in ("_collate", "_collate_tensors"):
        monkeypatch.setattr(collation, name, None)
    monkeypatch.setattr(collation, "_functions", {})
    samples = [SAMPLES["nested"](number) for number in range(3)]
    growing = GrowingBatch(3)
    kept = [growing.keep(sample) for sample in samples]
    assert all(row is sample for row, sample in zip(kept, samples, strict=True))
    assert describe(growing.collate(kept)) == describe(default_collate(samples))


def test_samples_are_freed_while_their_batch_is_read():
    alive, refs = [], []

    class Watched(Images):
        def __getitem__(self, index):
            alive.append(sum(ref() is not None for ref in refs))
            image = large(index)
            refs.append(weakref.ref(image))
            return image, index

    next(iter(DatasetLoader(Watched(), 7, shuffle=False)))
    assert alive == [0] * 7
    alive.clear()
    refs.clear()
    next(iter(DatasetLoader(Watched(), 7, shuffle=False, collate_fn=partial(default_collate))))
    assert alive == [*range(7)]
