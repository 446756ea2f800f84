"""Precisions: their dtypes, losses, gradient scaling and clipping; TF32 and compiled models."""

from __future__ import annotations

import shutil
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import Callback, ClassificationModel, Trainer
from runner.algorithms import GradientClipping
from runner.data import TensorLoader
from runner.device.numerics import set_numerics
from runner.training.precision import Precision

PRECISIONS = ["fp32", "amp_bf16", "amp_fp16", "bf16"]
pytestmark = pytest.mark.filterwarnings("ignore:precision='.*bf16'.*slower")


def make_net(*first: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*first, nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :3].argmax(1)


class StepRecords(Callback):
    """Records dtypes and losses, and at each step the norm of the gradients and the scale of the loss."""

    def __init__(self):
        self.types: set[str] = set()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []

    def after_loss(self, state, logger):
        self.types.add(f"inputs {state.batch[0].dtype}, outputs {state.outputs.dtype}")

    def after_train_batch(self, state, logger):
        gradients = [p.grad.float().flatten() for p in state.unwrapped_model.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()))
        self.losses.append(float(state.total_loss))
        if state.scaler is not None:
            self.scales.append(state.scaler.get_scale())


def train(precision: str, **arguments: Any) -> tuple[Trainer, StepRecords]:
    records = StepRecords()
    with Trainer(
        **{
            "model": ClassificationModel(make_net(), 3),
            "train_dataloader": TensorLoader(*make_data(), batch_size=16, shuffle=True),
            "eval_dataloader": TensorLoader(*make_data(), batch_size=16, shuffle=False),
            "optimizers": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
            "max_duration": "8ep",
            "callbacks": [records],
            "precision": precision,
            "device": "cpu",
            **arguments,
        }
    ) as trainer:
        trainer.fit()
    return trainer, records


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}], ids=str)
def test_each_precision_learns(precision: str, split: dict[str, Any]):
    trainer, records = train(precision, **split)
    half = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16", "bf16": "bfloat16"}[precision]
    inputs = "bfloat16" if precision == "bf16" else "float32"
    assert records.types == {f"inputs torch.{inputs}, outputs torch.{half}"}
    assert sum(records.losses[-4:]) / 4 < 0.5 < sum(records.losses[:2]) / 2
    assert float(trainer.state.eval_metric_values["eval"]["MulticlassAccuracy"]) > 0.85
    weights = {parameter.dtype for parameter in trainer.state.unwrapped_model.parameters()}
    assert weights == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert (trainer.state.scaler is not None) == (precision == "amp_fp16")


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16", "bf16"])
def test_losses_in_lower_precisions_are_close_to_single_precision(precision: str):
    losses, expected = train(precision, max_duration="4ba")[1].losses, train("fp32", max_duration="4ba")[1].losses
    assert losses == pytest.approx(expected, rel=0.02) and losses != expected


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_sees_unscaled_gradients(precision: str):
    norm = train(precision, max_duration="1ba")[1].norms[0]
    assert 0.05 < norm < 5  # the scaler makes gradients 65536 times as large
    assert norm == pytest.approx(train("fp32", max_duration="1ba")[1].norms[0], rel=0.05)
    norms = train(precision, max_duration="1ep", algorithms=[GradientClipping("norm", 0.01)])[1].norms
    assert len(norms) == 4 and norms == pytest.approx([0.01] * 4, rel=0.02)


def test_half_precision_equals_a_hand_written_loop_with_autocast_and_grad_scaler():
    trainer, records = train("amp_fp16", max_duration="2ep")
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = make_data()
    loader = TensorLoader(inputs, targets, batch_size=16, shuffle=True)
    losses = []
    for batch, labels in (pair for _ in range(2) for pair in loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(batch), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert records.losses == losses
    expected = {f"module.{name}": value for name, value in net.state_dict().items()}
    torch.testing.assert_close(dict(trainer.state.unwrapped_model.state_dict()), expected, rtol=0, atol=0)


def test_a_step_with_infinite_gradients_is_skipped_and_halves_the_scale():
    class Overflows(ClassificationModel):
        """The loss of the third batch overflows in half precision."""

        batches = 0

        def loss(self, outputs, batch):
            self.batches += self.training
            return super().loss(outputs, batch) * (1e30 if self.batches == 3 and self.training else 1.0)

    weights: list[list[torch.Tensor]] = []

    class RecordsWeights(Callback):
        def batch_end(self, state, logger):
            weights.append([parameter.clone() for parameter in state.unwrapped_model.parameters()])

    records = StepRecords()
    model = Overflows(make_net(), 3)
    train("amp_fp16", model=model, callbacks=[RecordsWeights(), records], max_duration="5ba")
    assert all(map(torch.equal, weights[1], weights[2]))
    assert not torch.equal(weights[2][0], weights[3][0])
    assert records.scales == [65536.0, 65536.0, 65536.0, 32768.0, 32768.0]


@pytest.mark.parametrize("precision", ["amp_bf16", "bf16"])
def test_integers_are_not_cast(precision: str):
    net = make_net(nn.Embedding(5, 6), nn.Flatten(0, 1))
    data = TensorLoader(torch.randint(5, (16, 1)), torch.zeros(16, dtype=torch.int64), batch_size=8, shuffle=False)
    train(precision, model=ClassificationModel(net, 3), train_dataloader=data, eval_dataloader=data, max_duration="1ep")


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("amp_bf6", "amp_bf16"),
        ("fp16", "amp_fp16"),
        ("amp", "amp_bf16"),
        ("FP32", "fp32"),
        ("float32", "fp32"),
        ("half", ""),
        (None, ""),
    ],
)
def test_an_unknown_precision_is_refused_with_a_suggestion(wrong: str | None, suggestion: str):
    question = f"; did you mean {suggestion!r}\\?" if suggestion else ""
    with pytest.raises(ValueError, match=f"^precision={wrong!r}: must be one of 'fp32', .*'bf16'{question}$"):
        Precision(wrong)


def test_the_error_for_fp8_names_the_algorithm():
    with pytest.raises(ValueError, match="precision='amp_fp8': choose 'amp_bf16', and add the algorithm Float8"):
        train("amp_fp8")


def test_tf32_is_refused_on_cpu_and_leaves_torch_settings_unchanged():
    with pytest.raises(ValueError, match="precision='tf32' needs a CUDA device of capability 8.0 or more, not cpu"):
        train("tf32")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_tf32_rounds_matrix_products_during_the_run_alone():
    a = torch.randn(256, 256, device="cuda")
    exact = (a.double() @ a.double()).float()
    error = {}
    for precision in ("fp32", "tf32"):
        with train(precision, device="cuda")[0]:
            pass
        assert torch.get_float32_matmul_precision() == "highest"
        restore = set_numerics(False, precision == "tf32")
        error[precision] = float((a @ a - exact).abs().max())
        restore()
    assert error["tf32"] > 10 * error["fp32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bfloat16_warns_on_a_cpu_without_a_unit_for_it(precision: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Precision(precision).check(torch.device("cpu"))
    slow = "bf16" in precision and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert ["no bfloat16 unit" in str(warning.message) for warning in caught] == [True] * slow


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform == "win32", reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("split", [{}, {"grad_accum": 2}], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
def test_a_compiled_model_has_the_losses_of_the_plain_model(split: dict[str, Any]):
    compiled, plain = (train("fp32", compile=compile, **split) for compile in (True, False))
    assert compiled[1].losses == pytest.approx(plain[1].losses, rel=1e-4, abs=1e-6)
    names = [list(trainer.state.unwrapped_model.state_dict()) for trainer, _ in (compiled, plain)]
    assert names[0] == names[1]
    assert compiled[0].state.unwrapped_model._compiled_call_impl is not None
