"""Errors in training and evaluation get a note that describes the step and the batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composed_configs import small_experiment

import runner
from runner.failures.errors import RankFailed, WrongConfig, wrong_argument
from runner.timing.time import Timestamp
from runner.training.accumulation import train_microbatch
from runner.trials.diagnosis import CALL, STEPS, naming_fault, noting_batch

DIGITS = ("trainer.max_duration=2ba", "callbacks=none")
TEXT = ("experiment=stdlib_lm_plain", *DIGITS, "data.eval_bytes=256")


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            (*TEXT, "model.module.vocab_size=100"),
            (
                "error: model=gpt does not fit data=stdlib_text. In its forward pass, with a batch of "
                "int64 (8, 128) from 10 to 121, int64 (8, 128) from 10 to 121 and an embedding of 100 rows:",
                "  IndexError: index out of range in self",
            ),
        ),
        (
            ("model=mlp", "algorithms=none", *DIGITS, "model.num_classes=9"),
            (
                "error: model=mlp does not fit data=digits. In its loss, with a batch of float32 (64, 1, 8, 8), "
                "int64 (64,) from 0 to 9 and outputs of float32 (64, 9):",
                "  IndexError: Target 9 is out of bounds.",
                "  class 9 needs outputs for 10 classes: model.num_classes=10",
            ),
        ),
        (
            ("model=mlp", "algorithms=none", *DIGITS, "model.module.in_features=65"),
            (
                "error: model=mlp does not fit data=digits. In its forward pass, with a batch of "
                "float32 (64, 1, 8, 8), int64 (64,) from 0 to 9:",
                "  RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x64 and 65x128)",
                "  an input has 64 numbers, not 65: model.module.in_features=64",
            ),
        ),
        (
            ("model=resnet8", "algorithms=none", *DIGITS, "model.module.in_channels=3"),
            (
                "error: model=resnet8 does not fit data=digits. In its forward pass, with a batch of "
                "float32 (64, 1, 8, 8), int64 (64,) from 0 to 9:",
                "  RuntimeError: Given groups=1, weight of size [16, 3, 3, 3], expected input[64, 1, 8, 8] to have 3 "
                "channels, but got 1 channels instead",
                "  an input has 1 channel, not 3: model.module.in_channels=1",
            ),
        ),
        (
            ("model=mlp", "algorithms=mixup", *DIGITS, "model.num_classes=9"),
            (
                "error: algorithms.mixup: RuntimeError: index 9 is out of bounds for dimension 1 with size 9",
                "  at BEFORE_LOSS, with model=mlp and data=digits",
            ),
        ),
    ],
)
def test_a_first_batch_that_does_not_fit_is_described(command: tuple[str, ...], lines: tuple[str, ...], run_here: Any):
    ended = run_here(*command)
    assert ended.code == 2
    assert tuple(ended.err.splitlines()[-len(lines) :]) == lines


OWN_TRAINING = """
import os

import torch
from torch import nn

from runner import Callback, Model
from runner.data import DatasetLoader


def data(label=1):
    rows = [{"x": {"image": torch.ones(4)}, "name": "a", "label": number} for number in [1] * 4 + [label] * 4]
    return tuple(DatasetLoader(rows, batch_size=4, shuffle=False) for _ in range(2))


class Own(Model):
    def __init__(self, features=4):
        super().__init__()
        self.net = nn.Linear(features, 2)

    def forward(self, batch):
        return {"logits": self.net(batch["x"]["image"])}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs["logits"], batch["label"])


class Fails(Callback):
    def batch_end(self, state, logger):
        if os.environ["RANK"] == "1":
            raise ValueError("no more")


class ReportsError(Callback):
    def close(self, state, logger):
        print("closing:", *state.error.__notes__)
"""
OWN_RUN = ("algorithms=none", "callbacks=none", "~model", "+model._target_=own.Own", "~data", "+data._target_=own.data")


def test_a_batch_of_mappings_is_described_by_its_keys_and_callbacks_see_the_note(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(OWN_TRAINING)
    ended = run_here(*OWN_RUN, "+data.label=7", "+callbacks.reports._target_=own.ReportsError")
    batch = "x.image float32 (4, 4), name list of 4 str, label int64 (4,) from 7 to 7"
    batch += " and outputs of logits float32 (4, 2)"
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith(f"in its loss, with a batch of {batch}: model._target_=own.Own")
    assert ended.out.splitlines()[-1] == f"closing: {ended.err.splitlines()[-1]}"


def test_an_error_of_torch_compile_describes_the_batch(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN_TRAINING)
    ended = run_app(*OWN_RUN, "+model.features=3", "trainer.compile=true", exit_code=2)
    expected = "In its forward pass, as torch.compile traces it, with a batch of x.image float32 (4, 4), name list of 4"
    assert expected in ended.stderr


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (("+data.label=7",), "in its loss, with a batch of x.image float32 (2, 4), name list of 2 str, label int64"),
        (("+callbacks.fails._target_=own.Fails",), "in callbacks.fails (own.Fails)"),
    ],
)
def test_an_error_on_another_rank_gets_one_note(changes: tuple[str, ...], line: str, tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN_TRAINING)
    ended = run_app(*OWN_RUN, *changes, "launch.nproc_per_node=2", exit_code=1)
    assert ended.stderr.splitlines()[-1].startswith(line)
    assert ended.stderr.count(line) == 1


def test_an_error_outside_of_a_step_describes_no_batch(run_here: Any):
    ended = run_here("model=mlp", "algorithms=none", "callbacks=nan_monitor", "optimizer.lr=1e30")
    assert ended.code == 3
    assert "the loss is" in ended.err and "with a batch of" not in ended.err


def test_a_device_assert_adds_a_note_about_check():
    with pytest.raises(RuntimeError) as raised, noting_batch(small_experiment()):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert [note for note in raised.value.__notes__ if "runner check" in note] == raised.value.__notes__


def test_a_device_assert_in_the_first_batch_is_an_error_with_a_hint():
    expected = (
        "^AcceleratorError: CUDA error: device-side assert triggered\n  usually a label .* runner check tries a few"
    )
    with pytest.raises(WrongConfig, match=expected), naming_fault(small_experiment()):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in")


OWN = """
from runner import ClassificationModel
from runner.models import MLP


class Unmeasurable(ClassificationModel):
    def __init__(self):
        super().__init__(MLP(64, [8], 10), 10)

    def update_metric(self, batch, outputs, metric):
        if not self.training:
            raise RuntimeError("cannot be measured")
"""


def test_an_error_in_an_evaluation_during_training_describes_the_evaluation_batch(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(OWN)
    model = ("~model.num_classes", "~model.module", "model._target_=own.Unmeasurable")
    ended = run_here("model=mlp", *model, "algorithms=none", *DIGITS)
    assert ended.code == 1
    expected = "in its metrics, with a batch of float32 (597, 1, 8, 8), int64 (597,) from 0 to 9"
    assert f"{expected}: model._target_=own.Unmeasurable, data=digits" in ended.err.splitlines()


READS = """
import torch
from runner.data import DatasetLoader


class Crop(torch.nn.Module):
    def forward(self, image):
        if not image[0]:
            raise ValueError("cannot be cropped")
        return image


def split():
    crop, samples = Crop(), 4
    training = [(crop, torch.full((64,), float(number)), number) for number in range(1, samples + 1)]
    return DatasetLoader(Images(training), 1, shuffle=False), DatasetLoader(Images(training[:2]), 1, shuffle=False)


class Images(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        crop, image, label = self.samples[index]
        return crop(image * (label != 3)), label
"""


def test_an_error_in_a_transform_is_not_blamed_on_the_forward_pass(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(READS)
    ended = run_here("model=mlp", "algorithms=none", "callbacks=none", "~data", "+data._target_=own.split")
    assert ended.code == 1
    assert "cannot be cropped" in ended.err and "while batch 3 of epoch 1 was read" in ended.err
    assert "forward pass" not in ended.err and "with a batch of" not in ended.err


def test_data_that_replace_a_group_are_named_as_typed(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(READS)
    data = ("~data", "+data._target_=own.split")
    ended = run_here("model=mlp", "algorithms=none", *DIGITS, *data, "model.num_classes=2")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].endswith(": model=mlp, data._target_=own.split")


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise KeyError("no items")


def train_on(batch: Any, error: Exception) -> None:
    """Train a microbatch with a model whose forward pass raises an error."""

    def fail(microbatch: Any) -> None:
        raise error

    nothing = Nothing()
    state = SimpleNamespace(batch=batch, microbatch=batch, timestamp=Timestamp(), drop_outputs=nothing)
    run: Any = SimpleNamespace(state=state, on=nothing, forward_stream=nothing, training_step=None, forward=fail)
    train_microbatch(run, 0, lambda: 1.0)


class Nothing:
    """Has every method, and each does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def __call__(self) -> None:
        pass


def note_of(batch: Any) -> str:
    with pytest.raises(ValueError, match="the original") as raised, noting_batch(small_experiment()):
        train_on(batch, ValueError("the original"))
    return "\n".join(getattr(raised.value, "__notes__", []))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_described_without_a_length(layout: torch.layout):
    batch = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert "with a batch of float32 (2, ...): model" in note_of(batch)


def test_a_batch_that_cannot_be_described_keeps_the_original_error():
    assert note_of(Unreadable()) == ""


def test_the_description_lists_the_first_tensors_or_says_there_are_none():
    note = note_of([torch.ones(2)] * 1000)
    assert note.endswith("float32 (2,), 984 more: model._target_=mine.model, data._target_=mine.data")
    assert "with a batch of list of 1 str: " in note_of(["text"])
    assert "with a batch of no tensors: " in note_of([])


def test_a_wrong_argument_in_a_step_is_shown_without_the_error_class():
    with (
        pytest.raises(WrongConfig, match=r"In its forward pass, .*:\n  context=4: must"),
        naming_fault(small_experiment()),
    ):
        train_on(torch.ones(2), wrong_argument("context", 4, "must be at least 8"))


def test_a_rank_ended_by_the_failure_of_another_gets_no_note():
    with pytest.raises(RankFailed) as raised, noting_batch(small_experiment()):
        train_on(torch.ones(2), RankFailed(1, "it was killed"))
    assert not hasattr(raised.value, "__notes__")


def test_a_function_of_the_user_named_like_a_step_gets_no_note():
    def loss() -> None:
        raise ValueError("the original")

    with pytest.raises(ValueError, match="the original") as raised, noting_batch(small_experiment()):
        loss()
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_called_by_the_loops(name: str):
    """If a loop spelled a call differently, errors in it would get no step."""
    rooms = Path(runner.__file__).parent
    modules = [*(rooms / "training").glob("*.py"), rooms / "models" / "loss.py", rooms / "models" / "first_loss.py"]
    lines = (line for path in modules for line in path.read_text().splitlines() if "def " not in line)
    assert name in [call[1] for call in map(CALL.search, lines) if call is not None]
