import pytest
import torch

from runner.data import DatasetLoader
from runner.data.small_tensors import SMALL


class Subclass(torch.Tensor):
    pass


TENSORS = {
    "labels": torch.arange(64),
    "a scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([[True, False], [False, True]]),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "strides": torch.arange(12).view(3, 4).T,
    "repeated": torch.tensor([2]).expand(3),
    "large": torch.arange(SMALL),
    "a leaf": torch.ones(3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "complex": torch.tensor([1 + 2j]),
    "a subclass": torch.ones(3).as_subclass(Subclass),
}


class Batches:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        whole = torch.arange(10)
        return TENSORS | {"inputs": whole[:-1], "targets": whole[1:], "shared": torch.arange(3).share_memory_()}


def take_first(samples):
    return samples[0]


@pytest.fixture(scope="module")
def received():
    (batch,) = DatasetLoader(Batches(), 1, shuffle=False, num_workers=1, collate_fn=take_first)
    return batch


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were_sent(received, name):
    arrived, sent = received[name], TENSORS[name]
    assert type(arrived) is type(sent)
    assert (arrived.dtype, arrived.shape, arrived.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert arrived.requires_grad == sent.requires_grad
    assert torch.equal(arrived, sent)


@pytest.mark.parametrize("name", ["labels", "a scalar", "flags"])
def test_small_tensors_are_sent_by_value_and_can_be_written(received, name):
    assert not received[name].is_shared()
    received[name].copy_(received[name].clone())


@pytest.mark.parametrize("name", ["large", "shared"])
def test_large_and_shared_tensors_stay_in_shared_memory(received, name):
    assert received[name].is_shared()


def test_views_of_a_tensor_still_share_its_memory(received):
    received["inputs"][3] = -1
    assert received["targets"].tolist() == [1, 2, -1, 4, 5, 6, 7, 8, 9]
