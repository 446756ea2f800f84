"""Batches of nested containers: their tensors, number of samples, device, and microbatches."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

from runner.device.batch import count_samples, map_tensors, split, tensors, to_device

Pair = namedtuple("Pair", ["inputs", "targets"])
N = 6


def nested() -> dict[str, Any]:
    return {
        "tuple": (torch.arange(N), [torch.ones(N, 2), {"deep": torch.zeros(N, 1, 3)}]),
        "pair": Pair(torch.arange(N) * 2, None),
        "ordered": OrderedDict(x=torch.arange(N)),
        "scalar": torch.tensor(3.0),
        "name": "batch",
        "number": 3,
        "flag": True,
    }


def test_map_tensors_keeps_containers_and_other_values():
    batch = nested()
    mapped = map_tensors(batch, lambda tensor: tensor + 1)
    assert list(mapped) == list(batch) and isinstance(mapped["pair"], Pair) and mapped["pair"].targets is None
    assert isinstance(mapped["ordered"], OrderedDict) and isinstance(mapped["tuple"][1], list)
    assert mapped["name"] == "batch" and mapped["number"] == 3 and mapped["flag"] is True
    assert [tensor.tolist() for tensor in tensors(mapped)] == [(tensor + 1).tolist() for tensor in tensors(batch)]
    assert float(mapped["scalar"]) == 4.0 and float(batch["scalar"]) == 3.0


def test_tensors_are_yielded_in_the_order_of_the_batch():
    assert [tensor.shape for tensor in tensors(nested())] == [(N,), (N, 2), (N, 1, 3), (N,), (N,), ()]
    assert list(tensors("none")) == []


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        (torch.zeros(4), torch.zeros(9)),
        {"scalar": torch.tensor(1.0), "x": torch.zeros(4)},
        [torch.zeros(4, 3), [torch.zeros(4), torch.zeros(4), torch.zeros(4)]],
        {"views": [torch.zeros(4, 3), torch.zeros(4, 3)], "y": torch.zeros(4)},
    ],
)
def test_the_first_tensor_with_a_dimension_determines_the_number_of_samples(batch: Any):
    assert count_samples(batch) == 4


def image(height: int) -> torch.Tensor:
    return torch.full((3, height, 5), float(height))


def target(boxes: int, **more: Any) -> dict[str, Any]:
    return {"boxes": torch.full((boxes, 4), float(boxes)), "labels": torch.arange(boxes), **more}


IN_LISTS = {
    "images and dicts": ((image(4), image(5)), (target(1), target(2))),
    "lists": [[image(4), image(5)], [target(1), target(0)]],
    "a dict of lists": {"images": [image(4), image(5)], "targets": [target(2), target(2)]},
    "pairs": [(image(4), target(1)), (image(5), target(2))],
    "mappings": [{"image": image(4), **target(1)}, {"image": image(5), **target(1)}],
    "images and masks": ([image(4), image(5)], [torch.zeros(4, 5), torch.zeros(5, 5)]),
    "images and numbers": ([image(4), image(4)], [7, 8]),
    "images and scalars": ([image(4), image(4)], [torch.tensor(7), torch.tensor(8)]),
    "images and names": ([image(4), image(4)], ["a", "b"]),
    "images and stacked labels": ([image(4), image(5)], torch.zeros(2)),
    "annotations, none for one": ([image(4), image(5)], [[target(1), target(2)], []]),
}


@pytest.mark.parametrize("name", IN_LISTS)
def test_the_length_of_lists_of_samples_is_the_number_of_samples(name: str):
    assert count_samples(IN_LISTS[name]) == count_samples(IN_LISTS[name], strict=True) == 2


@pytest.mark.parametrize("samples", range(1, 5))
@pytest.mark.parametrize("boxes", range(5))
def test_lists_of_samples_are_counted_even_if_their_tensors_suggest_another_number(samples: int, boxes: int):
    batch = ([image(4)] * samples, [target(boxes)] * samples)
    assert count_samples(batch) == samples


def test_the_length_of_views_in_a_list_is_the_number_of_samples():
    assert count_samples(([torch.zeros(4, 3)] * 2, [torch.zeros(4)] * 3), strict=True) == 4


@pytest.mark.parametrize(
    ("batch", "numbers"),
    [
        ({"images": [image(4), image(5)]}, "2 or 3"),
        ([{"a": torch.zeros(4)}, {"a": torch.zeros(4)}], "2 or 4"),
        ([[torch.zeros(4)]], "1 or 4"),
        (((image(4), image(5), image(6)), (image(4), image(5), image(6))), "2 or 3"),
        ([torch.zeros(7), torch.zeros(5), torch.zeros(9)], "5 or 7 or 9"),
        (([image(4), image(5)], [target(1), target(2)] * 2), "no number that all its parts agree on"),
    ],
)
def test_strict_counting_refuses_a_batch_with_an_ambiguous_number_of_samples(batch: Any, numbers: str):
    with pytest.raises(TypeError, match=rf"it may hold {numbers}. Override Model.num_samples"):
        count_samples(batch, strict=True)


@pytest.mark.parametrize("batch", [{}, "text", torch.tensor(1.0), [1, 2], (torch.tensor(1),)])
def test_a_batch_without_tensors_that_have_a_length_cannot_be_counted(batch: Any):
    with pytest.raises(TypeError, match="cannot count the samples"):
        count_samples(batch)


def test_tensors_on_the_right_device_are_not_copied():
    batch = nested()
    moved = to_device(batch, torch.device("cpu"))
    assert all(after is before for after, before in zip(tensors(moved), tensors(batch), strict=True))
    assert {tensor.device.type for tensor in tensors(to_device(batch, torch.device("meta")))} == {"meta"}


@pytest.mark.parametrize("kind", [tuple, list])
def test_only_tensors_on_another_device_are_moved(kind: type):
    on_cpu, on_meta = torch.zeros(2), torch.zeros(2, device="meta")
    batch = kind([on_cpu, on_cpu])
    same = to_device(batch, torch.device("cpu"))
    assert type(same) is kind and all(tensor is on_cpu for tensor in same)
    assert kind is tuple or same is not batch  # an algorithm may replace its items
    for mixed in (kind([on_cpu, on_meta]), kind([on_meta, on_cpu]), batch):
        moved = to_device(mixed, torch.device("meta"))
        assert type(moved) is kind and all(tensor.is_meta for tensor in moved)


@pytest.mark.parametrize("parts", range(1, 9))
def test_parts_make_up_the_batch_and_their_sizes_differ_by_at_most_one(parts: int):
    batch = nested()
    pieces = split(batch, N, parts=parts)
    assert len(pieces) == min(parts, N)
    sizes = [count_samples(piece) for _, piece in pieces]
    assert sum(sizes) == N and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert [start for start, _ in pieces] == [sum(sizes[:index]) for index in range(len(sizes))]
    columns = [list(tensors(piece)) for _, piece in pieces]
    for whole, parts_of_tensor in zip(tensors(batch), zip(*columns, strict=True), strict=True):
        assert torch.equal(torch.cat(parts_of_tensor) if whole.ndim else parts_of_tensor[0], whole)


@pytest.mark.parametrize(
    ("size", "sizes"), [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (5, [5, 1]), (6, [6]), (99, [6])]
)
def test_microbatches_have_the_size_except_the_last(size: int, sizes: list[int]):
    pieces = split((torch.arange(N), torch.arange(N)), N, size=size)
    assert [len(piece[0]) for _, piece in pieces] == sizes
    assert torch.cat([piece[1] for _, piece in pieces]).tolist() == list(range(N))


def test_several_pieces_are_views_and_a_single_piece_is_the_batch_itself():
    batch = (torch.arange(N), torch.arange(N))
    assert split(batch, N)[0] == (0, batch) and split(batch, N, parts=1)[0][1] is batch
    assert split(batch, N, size=N)[0][1] is batch
    for start, piece in split(batch, N, parts=4):
        assert piece[0].data_ptr() == batch[0][start:].data_ptr()


def test_texts_in_lists_are_split_with_their_samples():
    batch = {"x": torch.arange(3), "names": ["a", "b", "c"], "classes": ("cat", "dog"), "nested": [("d", "e", b"f"), 7]}
    (_, first), (_, second) = split(batch, 3, size=2)
    assert first["names"] == ["a", "b"] and second["names"] == ["c"]
    assert first["nested"] == [("d", "e"), 7] and second["nested"] == [(b"f",), 7]
    assert first["classes"] == second["classes"] == ("cat", "dog")


@pytest.mark.parametrize("samples", range(2, 6))
def test_lists_of_samples_are_split_between_samples(samples: int):
    images = [image(height) for height in range(3, 3 + samples)]
    batch = {"images": images, "targets": tuple(target(boxes) for boxes in range(samples)), "ids": [*range(samples)]}
    parts = [part for _, part in split(batch, samples, size=2)]
    for key in batch:
        assert [id(sample) for part in parts for sample in part[key]] == [id(sample) for sample in batch[key]]
        assert [len(part[key]) for part in parts[:-1]] == [2] * (len(parts) - 1)


def test_each_view_in_a_list_is_split():
    batch = ([torch.arange(2), torch.arange(2)], torch.arange(2))
    (_, first), (_, second) = split(batch, 2, size=1)
    assert [tensor.tolist() for tensor in tensors(first)] == [[0]] * 3
    assert [tensor.tolist() for tensor in tensors(second)] == [[1]] * 3


def test_tensors_of_another_length_cannot_be_split():
    with pytest.raises(ValueError, match=r"cannot split a batch of 6 samples: a tensor in it has shape \(7, 2\)"):
        split((torch.zeros(6), torch.zeros(7, 2)), 6, parts=2)
    split((torch.zeros(6), torch.zeros(7, 2)), 6, parts=1)


def test_an_object_is_moved_by_its_method_to_which_may_return_none():
    class Copied:
        def __init__(self, device: str = "cpu") -> None:
            self.device = device

        def to(self, device: torch.device) -> Copied:
            return Copied(str(device))

    class MovedInPlace(Copied):
        def to(self, device: torch.device) -> None:  # type: ignore[override]
            self.device = str(device)

    class Keys(dict[str, Any]):
        __getattr__ = dict.__getitem__

    batch = [Copied(), MovedInPlace(), Keys(to=torch.zeros(1))]
    moved = to_device(batch, torch.device("meta"))
    assert [item.device for item in moved[:2]] == ["meta", "meta"] and moved[1] is batch[1]
    assert moved[2]["to"].is_meta and batch[0].device == "cpu"


def test_map_tensors_accepts_read_only_mappings():
    mapped = map_tensors(MappingProxyType({"x": torch.zeros(2)}), lambda tensor: tensor + 1)
    assert mapped["x"].tolist() == [1.0, 1.0]
