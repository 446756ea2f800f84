"""Digests of values and of a training state, files of digests, and the first difference between two runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import PATIENCE
from torch import Tensor, nn

from runner import ClassificationModel, State, Trainer, first_difference
from runner.algorithms import EMA
from runner.checkpoints import hashing
from runner.checkpoints.digest import append_digests, digest_state, norm, read_digests, truncate_digests
from runner.checkpoints.hashing import digest
from runner.data import TensorLoader

QUIET_NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, 0x7FF8 << 48 | 1))

DIFFERENT: list[Any] = [
    *(None, True, False, 1, 0, -1, 10**30, 1.0, 0.0, -0.0, math.inf, QUIET_NAN, OTHER_NAN, "1", "", "None", b"1", b""),
    *([], [[]], [None], [1], [[1]], [1, 1], ["ab", "c"], ["a", "bc"], ["abc"], [1, [2]], [[1], 2], [[1, 2]]),
    *({}, {"a": 1}, {"a": 2}, {"b": 1}, {1: "a"}, {"1": "a"}, ["a", 1], {"a": {"b": 1}}, {"a": {}, "b": 1}),
    *(torch.tensor(value) for value in (0, 0.0, -0.0, True, False, 1j, -1j, math.nan, math.inf)),
    *(torch.zeros(shape) for shape in (1, 2, (1, 1), (2, 1), (1, 2), 0, (0, 1))),
    *(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    *(torch.zeros(1, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)),
    *(torch.zeros(1, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)),
    torch.tensor([1], dtype=torch.int16).view(torch.bfloat16),  # differs from zero in one bit
    torch.tensor([1], dtype=torch.int32).view(torch.float32),
]


def test_different_values_have_different_digests():
    digests = [(digest(value), value) for value in DIFFERENT]
    assert [(a[1], b[1]) for a, b in itertools.combinations(digests, 2) if a[0] == b[0]] == []
    assert all(len(hexadecimal) == 32 and int(hexadecimal, 16) >= 0 for hexadecimal, _ in digests)


@pytest.mark.parametrize("value", DIFFERENT, ids=repr)
def test_digests_ignore_the_type_of_a_sequence_and_the_order_of_keys(value: Any):
    assert digest(value) == digest(value)
    assert digest([value]) == digest((value,))
    assert digest({"a": 1, "b": [value], 3: None}) == digest(OrderedDict({3: None, "b": (value,), "a": 1}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_the_digest_of_a_tensor_depends_only_on_shape_dtype_and_values(dtype: torch.dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    equal = [transposed, tensor.clone(), torch.cat([tensor, tensor])[3:]]
    if dtype.is_floating_point:
        equal += [nn.Parameter(tensor), tensor.clone().requires_grad_() * 1]
    assert {*map(digest, equal)} == {digest(tensor)}


def test_a_digest_is_the_hash_of_the_documented_bytes():
    value = {"b": [None, True, -2, 0.5], "a": torch.tensor([[1.0]], dtype=torch.bfloat16), 3: b"xy"}
    written = b"dict 3;"  # sorted by the repr of the keys: 'a', 'b', 3
    written += b"str 1;a" + b"tensor torch.bfloat16 (1, 1);" + b"\x80\x3f"
    written += b"str 1;b" + b"list 4;NoneType None;bool True;int -2;float " + struct.pack("<d", 0.5)
    written += b"int 3;" + b"bytes 2;xy"
    assert digest(value) == hashlib.blake2b(written, digest_size=16).hexdigest()


def test_copying_tensors_to_the_host_together_does_not_change_their_digest(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (3,), (2, 5), (0,), (40, 50), (7, 1, 3)]
    random = [torch.randn(shape, generator=generator) for shape in shapes]
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
    tensors = [tensor.to(dtype) for tensor in random for dtype in dtypes]
    tensors += [random[2].t(), tensors[5].conj(), random[4][::2, 1::3], random[4].to_sparse()]
    value = {"a": tensors[::2], "b": [{"c": tensor, "d": 1.5} for tensor in tensors]}
    together = digest(value)
    monkeypatch.setattr(hashing, "MOST", 500)
    assert digest(value) == together
    monkeypatch.setattr(hashing, "SMALL", 0)  # copies each tensor on its own
    assert digest(value) == together


@pytest.mark.parametrize("value", [object(), {1, 2}, [torch.float32], {"a": 1j}])
def test_values_that_a_checkpoint_cannot_hold_have_no_digest(value: Any):
    with pytest.raises(TypeError, match="has no digest"):
        digest(value)


def make_trainer(**arguments: Any) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        inputs = torch.randn(12, 4)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(network, 3),
        "train_dataloader": TensorLoader(inputs, torch.arange(12) % 3, batch_size=4, shuffle=True),
        "optimizers": lambda params: torch.optim.AdamW(params, lr=0.01),
        "schedulers": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "algorithms": [EMA("2ba")],
        "max_duration": "2ep",
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit in the first byte of a tensor."""
    tensor.detach().view(-1)[:1].view(torch.uint8)[0] ^= 1


def weight(state: State) -> Tensor:
    return next(state.unwrapped_model.parameters())


CHANGES: dict[str, tuple[str, Callable[[State], Any]]] = {
    "weight": ("weights", lambda state: flip(weight(state))),
    "running mean": ("weights", lambda state: flip(state.unwrapped_model.get_buffer("module.1.running_mean"))),
    "first moment": ("optimizer", lambda state: flip(state.optimizers[0].state[weight(state)]["exp_avg"])),
    "step": ("optimizer", lambda state: flip(state.optimizers[0].state[weight(state)]["step"])),
    "learning rate": ("optimizer", lambda state: state.optimizers[0].param_groups[0].update(lr=0.02)),
    "schedule": ("optimizer", lambda state: setattr(state.schedulers[0], "last_epoch", 7)),
    "average": ("algorithms", lambda state: flip(state.algorithms[0].state_dict()["average"]["module.0.bias"])),
    "random number": ("randomness", lambda state: torch.rand(1)),
    "input": ("content", lambda state: flip(state.batch[0])),
    "target": ("content", lambda state: flip(state.batch[1])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changing_a_part_of_the_state_changes_only_the_digest_of_that_part(name: str):
    part, change = CHANGES[name]
    with torch.random.fork_rng(), make_trainer() as trainer:
        trainer.fit()
        before = digest_state(trainer.state)
        assert digest_state(trainer.state) == before  # computing a digest does not change the state
        change(trainer.state)
        after = digest_state(trainer.state)
    assert [key for key in before if before[key] != after[key]] == [part]


def test_the_digest_of_the_optimizer_includes_the_loss_scale():
    with make_trainer(precision="amp_fp16") as trainer:
        trainer.fit()
        before = digest_state(trainer.state)
        assert trainer.state.scaler is not None
        trainer.state.scaler.update(1024.0)
        after = digest_state(trainer.state)
    assert [key for key in before if before[key] != after[key]] == ["optimizer"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["randomness", "weights"])
def test_digests_include_weights_and_the_random_state_of_a_gpu(part: str):
    with torch.random.fork_rng(), make_trainer(device="cuda") as trainer:
        trainer.fit()
        before = digest_state(trainer.state)
        if part == "randomness":
            torch.rand(1, device="cuda")
        else:
            flip(weight(trainer.state))
        after = digest_state(trainer.state)
    assert [key for key in before if before[key] != after[key]] == [part]
    assert digest(torch.ones(3, device="cuda")) == digest(torch.ones(3))


def write(path: Path, lines: dict[int, dict[str, str]], rest: str = "") -> Path:
    """Write a file of digests, one line per batch, followed by `rest`, such as an unfinished line."""
    path.write_text("".join(json.dumps({"epoch": 0, "batch": batch, **parts}) + "\n" for batch, parts in lines.items()))
    with path.open("a") as file:
        file.write(rest)
    return path


def test_the_first_difference_names_batch_and_parts(tmp_path: Path):
    whole = {batch: {"samples": f"s{batch}", "weights": f"w{batch}"} for batch in range(1, 7)}
    a = write(tmp_path / "a", whole)
    assert first_difference(a, a) == (6, None, ())
    b = write(tmp_path / "b", {**whole, 4: {"samples": "s4", "weights": "x"}, 5: {"samples": "x", "weights": "x"}})
    assert first_difference(a, b) == first_difference(b, a) == (3, 4, ("weights",))
    assert first_difference(a, b, ["samples"]) == (4, 5, ("samples",))
    assert first_difference(a, write(tmp_path / "c", {1: {}}))._asdict() == {
        "agreed": 0,
        "batch": 1,
        "parts": ("samples", "weights"),
    }


def test_only_batches_in_both_files_are_compared(tmp_path: Path):
    every_third = write(tmp_path / "a", {batch: {"weights": str(batch)} for batch in (3, 6, 9)}, rest='{"epoch":0,"b')
    every_second = write(tmp_path / "b", {batch: {"weights": str(batch)} for batch in (2, 4, 6, 8)})
    assert first_difference(every_third, every_second) == (6, None, ())
    assert first_difference(every_second, every_third) == (6, None, ())
    with pytest.raises(ValueError, match="no batch in common"):
        first_difference(every_third, write(tmp_path / "c", {2: {}, 4: {}}))


def test_first_difference_accepts_the_folder_of_a_run(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="state_digest"):
        first_difference(tmp_path, tmp_path)
    write(tmp_path / "digests.jsonl", {1: {"weights": "w"}})
    assert first_difference(tmp_path, tmp_path / "digests.jsonl") == (1, None, ())


def test_truncation_removes_later_batches_and_an_unfinished_line(tmp_path: Path):
    path = write(tmp_path / "a", {})
    for batch in (2, 4, 6):
        append_digests(path, {"epoch": 0, "batch": batch, "weights": str(batch)})
    two_lines = "".join(path.read_text().splitlines(True)[:2])
    with path.open("a") as file:
        file.write('{"epoch":0,"batch":8,"wei')
    truncate_digests(path, 5)
    assert path.read_text() == two_lines
    assert [line["batch"] for line in read_digests(path)] == [2, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_files_of_digests_are_compared_without_importing_torch(tmp_path: Path):
    write(tmp_path / "digests.jsonl", {1: {"weights": "w"}})
    program = "import sys, runner; print(runner.first_difference('.', '.'), 'torch' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert finished.stdout == "DigestComparison(agreed=1, batch=None, parts=()) False\n"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.complex64])
def test_norm_accepts_tensors_of_every_dtype(dtype: torch.dtype):
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]).to(dtype), torch.empty(0)]
    assert norm(tensors) == pytest.approx(5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_norm_of_many_tensors_equals_the_norm_of_their_norms_bit_for_bit(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (7,), (33, 5), (0,), (4, 3, 2), (1000,)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]
    numbers = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    expected = sum(float(real.double().norm()) ** 2 for real in numbers) ** 0.5
    assert norm(tensors) == norm([tensor.clone().requires_grad_() for tensor in tensors]) == expected
    assert norm([]) == 0.0
