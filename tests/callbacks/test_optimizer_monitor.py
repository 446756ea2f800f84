from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.algorithms import GradientClipping
from runner.callbacks import InMemoryLogger, OptimizerMonitor, _thinning
from runner.callbacks.optimizer_monitor import l2_norms
from runner.data import TensorLoader


class ByHand(Callback):
    """Computes the same norms one parameter at a time, in float64."""

    def __init__(self, moment: str = "exp_avg"):
        self.moment = moment
        self.norms: dict[int, dict[str, float]] = {}

    def after_train_batch(self, state, logger):
        named = state.unwrapped_model.named_parameters()
        self.gradients = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        self.before = {name: parameter.detach().clone() for name, parameter in state.unwrapped_model.named_parameters()}

    def batch_end(self, state, logger):
        norms = self.norms[state.timestamp.batch] = {}
        for name, parameter in state.unwrapped_model.named_parameters():
            optimizer_state = state.optimizers[0].state[parameter]
            norms[f"l2_norm/grad/{name}"] = norm(self.gradients[name])
            if self.moment:
                norms[f"l2_norm/param/{name}"] = norm(parameter)
                norms[f"l2_norm/update/{name}"] = norm(parameter - self.before[name])
                norms[f"l2_norm/moment/{name}"] = norm(optimizer_state[self.moment])
        norms["l2_norm/grad/global"] = sum(norm(gradient) ** 2 for gradient in self.gradients.values()) ** 0.5


def norm(tensor: torch.Tensor) -> float:
    return tensor.detach().double().square().sum().sqrt().item()


def make_trainer(*callbacks: Callback, **arguments: Any) -> tuple[Trainer, InMemoryLogger]:
    torch.manual_seed(0)
    memory = InMemoryLogger()
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), 3),
        "train_dataloader": TensorLoader(torch.randn(40, 5), torch.arange(40) % 3, batch_size=4, shuffle=True),
        "optimizers": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
        "max_duration": "10ba",
        "callbacks": callbacks,
        "loggers": [memory],
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments)), memory


def logged(memory: InMemoryLogger) -> dict[int, dict[str, float]]:
    """Return the norms by step and key."""
    norms: dict[int, dict[str, float]] = {}
    for key, series in memory.data.items():
        if key.startswith("l2_norm/"):
            for timestamp, value in series:
                norms.setdefault(timestamp.batch, {})[key] = value
    return norms


OPTIMIZERS = {
    "exp_avg": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "momentum_buffer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("moment", OPTIMIZERS)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"grad_accum": 2}, {"algorithms": [GradientClipping("norm", 0.1)]}],
    ids=["plain", "accum", "clip"],
)
def test_norms_equal_those_computed_by_hand_in_float64(moment: str, arguments: dict):
    by_hand = ByHand(moment)
    arguments = {"optimizers": OPTIMIZERS[moment], **arguments}
    trainer, memory = make_trainer(by_hand, OptimizerMonitor(batch_log_interval=3), **arguments)
    with trainer:
        trainer.fit()
    steps = logged(memory)
    assert [*steps] == [3, 6, 9]
    for step, norms in steps.items():
        assert norms == pytest.approx(by_hand.norms[step], rel=1e-5)
        if arguments.get("algorithms"):
            assert norms["l2_norm/grad/global"] <= 0.1001


def test_without_optimizer_metrics_only_gradients_are_logged():
    trainer, memory = make_trainer(OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=5))
    with trainer:
        trainer.fit()
    names = ["global", *(name for name, _ in trainer.state.unwrapped_model.named_parameters())]
    assert {step: {*norms} for step, norms in logged(memory).items()} == {
        step: {f"l2_norm/grad/{name}" for name in names} for step in (5, 10)
    }


def test_moments_are_logged_from_the_first_batch_on():
    trainer, memory = make_trainer(OptimizerMonitor(batch_log_interval=1))
    with trainer:
        trainer.fit()
    norms = logged(memory)
    assert "l2_norm/moment/module.0.weight" in norms[1]
    assert norms[1].keys() == norms[2].keys()


def test_logging_norms_does_not_change_training():
    weights = []
    for callbacks in ([], [OptimizerMonitor(batch_log_interval=1)]):
        trainer, _ = make_trainer(*callbacks)
        with trainer:
            trainer.fit()
        weights.append([weight.tolist() for weight in trainer.state.unwrapped_model.parameters()])
    assert weights[0] == weights[1]


def test_parameters_without_a_gradient_are_left_out():
    model = ClassificationModel(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), 3)
    model.module[0].requires_grad_(False)  # type: ignore[index]
    trainer, memory = make_trainer(OptimizerMonitor(), model=model)
    with trainer:
        trainer.fit()
    (norms,) = logged(memory).values()
    assert {key.rpartition("/")[2] for key in norms} == {"global", "module.2.weight", "module.2.bias"}


def test_a_resumed_run_logs_the_same_as_an_uninterrupted_one(tmp_path):
    whole, memory = make_trainer(OptimizerMonitor(batch_log_interval=4))
    with whole:
        whole.fit()
    expected = logged(memory)
    first, _ = make_trainer(OptimizerMonitor(batch_log_interval=4))
    with first:
        first.fit(duration="6ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    second, memory = make_trainer(OptimizerMonitor(batch_log_interval=4), resume_path=tmp_path / "checkpoint")
    with second:
        second.fit()
    assert logged(memory) == {8: expected[8]}


def test_norms_of_16_bit_tensors_are_float32():
    tensors = [torch.full((10_000,), 0.01, dtype=torch.bfloat16), torch.full((3,), 300.0, dtype=torch.float16)]
    for group in ([tensors[0]], [tensors[1]], tensors):
        norms = l2_norms(group)
        assert {value.dtype for value in norms} == {torch.float32}
        assert [value.item() for value in norms] == pytest.approx([norm(tensor) for tensor in group], rel=1e-5)
    assert l2_norms([*tensors, torch.ones(4, dtype=torch.float64)])[2].item() == 2
    assert l2_norms([]) == []


def test_sparse_gradients_have_norms_too():
    model = ClassificationModel(nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)), 3)
    trainer, memory = make_trainer(
        OptimizerMonitor(),
        model=model,
        train_dataloader=TensorLoader(
            torch.arange(80).reshape(40, 2) % 7, torch.arange(40) % 3, batch_size=4, shuffle=False
        ),
        optimizers=OPTIMIZERS[""],
    )
    with trainer:
        trainer.fit()
        gradients = [parameter.grad.to_dense() for parameter in model.parameters() if parameter.grad is not None]
    (norms,) = logged(memory).values()
    assert norms["l2_norm/grad/module.0.weight"] == pytest.approx(norm(gradients[0]))
    assert norms["l2_norm/grad/global"] == pytest.approx(sum(norm(gradient) ** 2 for gradient in gradients) ** 0.5)


def test_ranks_log_norms_of_the_whole_batch_and_of_whole_sharded_tensors(run_ranks):
    def program():
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        from runner import ClassificationModel, Trainer
        from runner.callbacks import InMemoryLogger, OptimizerMonitor
        from runner.callbacks.optimizer_monitor import l2_norms
        from runner.data import TensorLoader

        torch.manual_seed(0)
        memory = InMemoryLogger()
        model = ClassificationModel(nn.Linear(5, 3), 3)
        inputs, targets = torch.randn(12, 5), torch.arange(12) % 3
        data = TensorLoader(inputs, targets, batch_size=12, shuffle=False)
        nn.functional.cross_entropy(model.module(inputs), targets).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        expected = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        with Trainer(
            model=model,
            train_dataloader=data,
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            max_duration="1ep",
            device="cpu",
            callbacks=[OptimizerMonitor(batch_log_interval=1)],
            loggers=[memory],
        ) as trainer:
            trainer.fit()
            (norm,) = memory.get_timeseries("l2_norm/grad/global")[1]
            assert abs(norm - expected) < 1e-6

            mesh = init_device_mesh("cpu", (2,))
            whole = torch.arange(7.0)
            sharded = [distribute_tensor(whole, mesh, [placement]) for placement in (Shard(0), Replicate())]
            assert [value.item() for value in l2_norms(sharded)] == [whole.norm().item()] * 2
            dist.barrier()

    run_ranks(program)


@pytest.mark.parametrize("value", [0, 2.5, True])
def test_wrong_arguments_are_refused(value: Any):
    with pytest.raises(ValueError, match=f"batch_log_interval={value!r}"):
        OptimizerMonitor(batch_log_interval=value)


def test_the_default_interval_is_10_batches_at_first_and_100_later(monkeypatch: pytest.MonkeyPatch):
    assert [_thinning.next_measurement(10, batch) for batch in (25, 990, 1000, 1150)] == [30, 1000, 1100, 1200]
    monkeypatch.setattr(_thinning, "DENSE", 30)
    trainer, memory = make_trainer(OptimizerMonitor(), max_duration="25ba")
    with trainer:
        trainer.fit()
        trainer.fit(duration="180ba")  # continues at batch 25
    assert [*logged(memory)] == [10, 20, 30, 100, 200]
