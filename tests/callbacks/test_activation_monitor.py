from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats
import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, LanguageModel, Trainer, save_checkpoint
from runner.algorithms import Compile
from runner.callbacks import ActivationMonitor, InMemoryLogger
from runner.callbacks.activation_monitor import statistics
from runner.data import TensorLoader
from runner.models import GPT


class KeepInputs(Callback):
    """Keeps the inputs of each microbatch."""

    def __init__(self):
        self.inputs: list[Any] = []

    def before_forward(self, state, logger):
        self.inputs.append(state.microbatch[0].clone())


def make_trainer(*callbacks: Callback, **arguments: Any) -> tuple[Trainer, InMemoryLogger]:
    torch.manual_seed(0)
    memory = InMemoryLogger()
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    defaults: dict[str, Any] = {
        "model": ClassificationModel(network, 3),
        "train_dataloader": TensorLoader(torch.randn(40, 6), torch.arange(40) % 3, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(torch.randn(4, 6), torch.arange(4) % 3, batch_size=4, shuffle=False),
        "max_duration": "10ba",
        "loggers": [memory],
    }
    return tiny_trainer(*callbacks, **(defaults | arguments)), memory


def fit(*callbacks: Callback, **arguments: Any) -> tuple[Trainer, InMemoryLogger]:
    trainer, memory = make_trainer(*callbacks, **arguments)
    with trainer:
        trainer.fit()
    return trainer, memory


def logged(memory: InMemoryLogger) -> dict[int, dict[str, float]]:
    """Return the logged statistics by batch and key."""
    results: dict[int, dict[str, float]] = {}
    for key, series in memory.data.items():
        for timestamp, value in series:
            if key.startswith("activations/"):
                results.setdefault(timestamp.batch, {})[key] = value
    return results


def test_statistics_equal_those_of_numpy_and_scipy():
    values = torch.randn(3, 4, 50, dtype=torch.float64).exp()
    results = {name: value.item() for name, value in statistics(values).items()}
    array = values.numpy()
    assert results["l2_norm"] == pytest.approx(((array**2).sum(-1) ** 0.5).mean())
    assert results["average"] == pytest.approx(array.mean())
    assert results["kurtosis"] == pytest.approx(scipy.stats.kurtosis(array, axis=-1).mean())
    assert results["max"] == pytest.approx(array.max(-1).mean())


def test_kurtosis_ignores_constant_rows_and_does_not_depend_on_scale():
    values = torch.rand(2, 50, dtype=torch.float64)  # uniform, whose kurtosis is far from 0
    with_constant = torch.cat([values, torch.ones(3, 50, dtype=torch.float64)])
    assert statistics(with_constant)["kurtosis"].item() == pytest.approx(statistics(values)["kurtosis"].item())
    assert math.isnan(statistics(torch.ones(3, 50))["kurtosis"].item())
    assert math.isnan(statistics(torch.full((3, 50), 0.1))["kurtosis"].item())  # their mean has a rounding error
    with_nan = torch.cat([values, torch.full((1, 50), math.nan, dtype=torch.float64)])
    assert all(math.isnan(value.item()) for value in statistics(with_nan).values())
    for small in (1e-9 * values.float(), 1e-16 * values.float(), 1e-100 * values):
        assert statistics(small)["kurtosis"].item() == pytest.approx(statistics(values)["kurtosis"].item(), rel=1e-4)


def test_statistics_of_float16_are_computed_in_float32():
    results = statistics(torch.full((2, 4096), 300.0, dtype=torch.float16))
    assert results["l2_norm"].item() == pytest.approx(300 * 64)
    assert results["average"].dtype == torch.float32


@pytest.mark.parametrize("arguments", [{}, {"grad_accum": 2}], ids=["batch", "microbatches"])
def test_inputs_and_outputs_of_each_module_are_logged(arguments: dict):
    keep = KeepInputs()
    trainer, memory = fit(keep, ActivationMonitor("7ba"), optimizers=lambda p: torch.optim.SGD(p, lr=0.0), **arguments)
    _, _, first, _, third = trainer.state.unwrapped_model.modules()
    inputs = keep.inputs[6 * arguments.get("grad_accum", 1)]  # the first microbatch of the seventh batch
    before_relu = first(inputs)
    hidden = before_relu.relu()
    outputs = third(hidden)
    expected = {
        "module_input.0": inputs,
        "module.0_input.0": inputs,
        "module.0_output.0": before_relu,
        "module.1_input.0": before_relu,  # although ReLU changes it in place
        "module.1_output.0": hidden,
        "module.2_input.0": hidden,
        "module.2_output.0": outputs,
        "module_output.0": outputs,
    }
    results = {
        f"activations/{name}/{tensor_name}": value.item()
        for tensor_name, tensor in expected.items()
        for name, value in statistics(tensor).items()
    }
    assert logged(memory) == {7: pytest.approx(results, rel=1e-5, nan_ok=True)}


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        ("3ba", [3, 6, 9, 12]),
        ("1ep", [5, 10]),
        (1, [5, 10]),
        ("0.5dur", [6, 12]),
        ("0.2dur", [3, 5, 8, 10, 12]),
        ("99ba", []),
    ],
)
def test_the_batch_that_completes_an_interval_is_logged(interval: Any, steps: list[int]):
    loader = TensorLoader(torch.randn(20, 6), torch.arange(20) % 3, batch_size=4, shuffle=True)
    _, memory = fit(ActivationMonitor(interval), train_dataloader=loader, max_duration="12ba")
    assert [*logged(memory)] == steps


def test_the_default_interval_is_25_batches_and_100_after_batch_1000():
    trainer, memory = make_trainer(ActivationMonitor(), eval_dataloader=None, max_duration="980ba")
    with trainer:
        trainer.fit()
        trainer.fit(duration="230ba")  # continues at batch 980
    assert [*logged(memory)] == [*range(25, 1001, 25), 1100, 1200]


def test_monitoring_does_not_change_training_and_leaves_no_hooks():
    weights = []
    for callbacks in ([], [ActivationMonitor("1ba")]):
        trainer, _ = fit(*callbacks)
        weights.append([weight.tolist() for weight in trainer.state.unwrapped_model.parameters()])
    assert weights[0] == weights[1]
    modules = trainer.state.unwrapped_model.modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_modules_are_ignored_by_class_name():
    _, memory = fit(ActivationMonitor("10ba", ["ReLU", "Sequential"]))
    (results,) = logged(memory).values()
    assert {key.split("/")[2].split("_")[0] for key in results} == {"module.0", "module.2"}
    with pytest.raises(ValueError, match="no module is a 'Relu'; there are .*ReLU"):
        fit(ActivationMonitor(ignore_module_types=["Relu"]))


def test_tensors_of_integers_such_as_tokens_are_not_logged():
    tokens = torch.randint(16, (8, 9))
    _, memory = fit(
        ActivationMonitor("1ba"),
        model=LanguageModel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))),
        train_dataloader=TensorLoader(
            tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), batch_size=4, shuffle=False
        ),
        eval_dataloader=None,
        max_duration="1ba",
    )
    (results,) = logged(memory).values()
    names = {key.removeprefix("activations/max/") for key in results if "/max/" in key}
    assert names == {"module.0_output.0", "module.1_input.0", "module.1_output.0", "module_output.0"}


def test_tensors_in_containers_and_keyword_arguments_are_numbered():
    class Pair(nn.Module):
        def forward(self, x, *, scale):
            return {"whole": x.long(), "parts": [x * scale, x]}

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            x = self.pair(x, scale=torch.ones(6))["parts"][0]
            return self.out(self.pair(x, scale=torch.zeros(6))["parts"][1])  # only the first call is logged

    _, memory = fit(ActivationMonitor("10ba"), model=ClassificationModel(Network(), 3))
    (results,) = logged(memory).values()
    names = {key.removeprefix("activations/max/") for key in results if "/max/module.pair" in key}
    assert names == {f"module.pair_{tensor}" for tensor in ("input.0", "input.1", "output.1", "output.2")}
    assert results["activations/max/module.pair_output.1"] > 0


def test_a_resumed_run_logs_the_same_batches(tmp_path):
    _, memory = fit(ActivationMonitor("4ba"))
    whole = logged(memory)
    first, _ = make_trainer(ActivationMonitor("4ba"))
    with first:
        first.fit(duration="6ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    _, memory = fit(ActivationMonitor("4ba"), resume_path=tmp_path / "checkpoint")
    assert logged(memory) == {8: pytest.approx(whole[8], nan_ok=True)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs):
        return inputs + self.linear(inputs)


def blocks(*others: Any) -> ClassificationModel:
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(Block(), nn.ReLU()) for _ in range(4)), *others)
            self.head = nn.Linear(6, 3)

        def forward(self, inputs):
            return self.head(self.blocks(inputs))

    return ClassificationModel(Network(), 3)


class CompileBlock(Algorithm):
    """Compiles one block at AFTER_LOAD."""

    def after_load(self, state, logger):
        state.unwrapped_model.get_submodule("module.blocks.1.0").compile()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("arguments", "modules"),
    [
        (lambda: {"compile": True}, "the model:"),
        (lambda: {"algorithms": Compile(scope="model")}, "the model:"),
        (
            lambda: {"algorithms": Compile(), "model": LanguageModel(GPT(n_layers=4))},
            r"module.blocks.0, .* and 1 more:",
        ),
        (lambda: {"algorithms": CompileBlock(), "model": blocks()}, "module.blocks.1.0:"),
        (lambda: {"model": blocks(torch.compile(Block()))}, "module.blocks.4:"),
    ],
)
def test_compiled_modules_are_refused(arguments: Callable[[], dict[str, Any]], modules: str):
    with pytest.raises(ValueError, match=f"ActivationMonitor needs modules that are not compiled, unlike {modules}"):
        fit(ActivationMonitor(), **arguments())


def test_each_rank_logs_statistics_of_its_own_samples(run_ranks):
    def program():
        import torch
        from tiny_runs import tiny_trainer

        from runner.callbacks import ActivationMonitor, InMemoryLogger
        from runner.data import TensorLoader

        memory = InMemoryLogger()
        inputs = torch.tensor([1.0, 2.0]).repeat(6)[:, None].expand(12, 3)  # rank 0 has the samples of 1.0
        data = TensorLoader(inputs, torch.arange(12) % 2, batch_size=2, shuffle=False)
        monitor = ActivationMonitor("3ba")
        with tiny_trainer(monitor, train_dataloader=data, max_duration="1ep", loggers=[memory]) as trainer:
            trainer.fit()
            print(memory.get_timeseries("activations/average/module_input.0"))

    assert [rank.stdout.strip() for rank in run_ranks(program)] == ["([3, 6], [1.0, 1.0])", "([3, 6], [2.0, 2.0])"]


@pytest.mark.parametrize(
    ("name", "value"), [("interval", "0ba"), ("interval", "10sp"), ("interval", "1m"), ("ignore_module_types", "ReLU")]
)
def test_wrong_arguments_are_refused(name: str, value: str):
    with pytest.raises(ValueError, match=f"{name}="):
        ActivationMonitor(**{name: value})


def test_a_fraction_of_a_duration_in_samples_is_refused():
    with pytest.raises(ValueError, match=r"interval='0.1dur': .* \(max_duration='100sp', 10 batches an epoch\)"):
        fit(ActivationMonitor("0.1dur"), max_duration="100sp")
