"""CUDAGraph. Without a GPU, a stand-in records the CPU's operations and repeats them in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_runs import program_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner import Algorithm, Callback, ClassificationModel, Trainer
from runner.algorithms import DDP, EMA, SAM, CUDAGraph, GradientClipping, LabelSmoothing, MixUp, _recording, cuda_graph
from runner.callbacks import InMemoryLogger
from runner.data import TensorLoader
from runner.distributed.collectives import destroy_process_group, init_process_group

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Recorded(TorchDispatchMode):
    """Stores the operations of this thread with their arguments and results, and can repeat them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view has the same memory each time
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                pairs = [(again, result)] if isinstance(result, Tensor) else zip(again, result, strict=True)
                for new, recorded in pairs:
                    if isinstance(recorded, Tensor) and new is not recorded:
                        recorded.copy_(new)


def record_operations(function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """Record the CPU's operations, as `_recording.record` records those of a GPU."""
    recorded = Recorded()
    with recorded:
        result = function()
    return result, recorded.replay


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the CPU's operations instead of a GPU's; return the list of recorded functions, two for each step."""
    functions: list[Any] = []
    monkeypatch.setattr(cuda_graph, "DEVICES", ("cpu", "cuda"))
    if not torch.cuda.is_available():
        monkeypatch.setattr(_recording, "record", lambda *pair: functions.append(pair) or record_operations(*pair))
    return functions


class Dropping(nn.Module):
    """Has dropout and running statistics, which a recording may get wrong, and counts its calls in Python."""

    def __init__(self, in_features: int = 32) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_features, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layers(x)


def net() -> ClassificationModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ClassificationModel(Dropping(), 3)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 2, 4, 4, generator=generator), torch.arange(20) % 3  # the last batch of 8 has 4


class Weights(Callback):
    """Stores the loss and the weights after each batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def batch_end(self, state, logger):
        weights = {name: tensor.detach().clone() for name, tensor in state.unwrapped_model.state_dict().items()}
        self.seen.append((state.total_loss.clone(), weights))


@pytest.fixture
def train_both(make_trainer) -> Callable[..., tuple[Any, Any]]:
    """Return a function that trains with and without CUDAGraph, and returns losses, weights and network of each."""

    def run(*, make: Callable[[], list[Algorithm]] = list, **options: Any) -> tuple[Any, Any]:
        results = []
        for algorithms in ([CUDAGraph()], []):
            weights, memory = Weights(), InMemoryLogger()
            data = images()
            arguments = {
                "build": net,
                "train_dataloader": TensorLoader(*data, batch_size=8, shuffle=True),
                "eval_dataloader": TensorLoader(*data, batch_size=8, shuffle=False),
                "max_duration": "3ep",
                "callbacks": [weights, memory],
                **options,
            }
            with make_trainer(*algorithms, *make(), **arguments) as trainer:
                trainer.fit()
                trainer.predict(TensorLoader(data[0], batch_size=4, shuffle=False))  # without targets
            logged = [value for _, value in memory.data["loss/train/total"]]  # the logger reads losses later
            results.append((weights.seen, logged, trainer.state.unwrapped_model.module))
        return results[0], results[1]

    return run


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_step_trains_the_same_and_runs_no_python(train_both, stand_in, device: str):
    recorded, plain = train_both(device=device)
    exact: Any = {"rtol": 0, "atol": 0} if device == "cpu" else {}
    torch.testing.assert_close(recorded[:2], plain[:2], **exact)  # dropout and running statistics too
    # Python runs in the warm-up, in the recording, and in the smaller last batch of each of three epochs.
    assert recorded[2].calls == _recording.WARM_UP + 1 + 3 and plain[2].calls == 9
    assert device == "cuda" or len(stand_in) == 2


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_weights_anew_in_each_replay(train_both, stand_in, precision: str, device: str):
    recorded, plain = train_both(precision=precision, device=device)
    torch.testing.assert_close(recorded[:2], plain[:2])


@pytest.mark.parametrize(
    "make",
    [lambda: [GradientClipping("norm", 0.01)], lambda: [EMA(half_life="2ba")], lambda: [SAM()]],
    ids=["clipping", "ema", "sam"],
)
def test_algorithms_around_a_step_act_as_without_graphs(train_both, stand_in, make: Callable[[], list[Algorithm]]):
    recorded, plain = train_both(make=make)
    torch.testing.assert_close(recorded[:2], plain[:2])


def test_named_losses_are_logged_separately(train_both, stand_in):
    class TwoLosses(ClassificationModel):
        def loss(self, outputs, batch):
            return {"class": super().loss(outputs, batch), "size": outputs.square().mean()}

    recorded, plain = train_both(build=lambda: TwoLosses(net().module, 3))
    torch.testing.assert_close(recorded[:2], plain[:2], rtol=0, atol=0)


def test_recorded_training_resumes_bit_for_bit(check_resume, stand_in):
    check_resume(lambda: [CUDAGraph()], build=lambda: net().double())


def on_two_ranks() -> None:
    """Train on this rank with and without recorded steps, and compare the weights."""
    cuda_graph.DEVICES, _recording.record = ("cpu",), record_operations  # type: ignore[assignment]
    init_process_group(torch.device("cpu"))

    def train(*algorithms: Algorithm) -> list[Any]:
        weights = Weights()
        with Trainer(
            model=net(),
            train_dataloader=TensorLoader(*images(), batch_size=8, shuffle=True),
            optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_duration="2ep",
            algorithms=algorithms,
            callbacks=[weights],
            device="cpu",
            progress_bar=False,
        ) as trainer:
            trainer.fit()
        return weights.seen

    torch.testing.assert_close(train(CUDAGraph()), train(), rtol=0, atol=0)
    try:
        train(CUDAGraph(), DDP(static_graph=True))
    except ValueError as error:
        print("leave out static_graph" in str(error))
    destroy_process_group()


@pytest.mark.slow
def test_gradients_of_recorded_steps_are_averaged_over_ranks(run_ranks):
    ranks = run_ranks(program_of("algorithms/test_cuda_graph", "on_two_ranks"), 2)
    assert [rank.stdout.split() for rank in ranks] == [["True"]] * 2


def test_steps_that_cannot_be_recorded_are_refused(make_trainer, stand_in):
    for options, message in (
        ({"grad_accum": 2}, "CUDAGraph cannot accumulate gradients: set grad_accum=1"),
        ({"microbatch_size": "auto"}, "CUDAGraph cannot accumulate gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(CUDAGraph(), **options)
    for other in (LabelSmoothing(), MixUp()):
        message = f"CUDAGraph: {type(other).__name__} acts between the forward pass and the loss; leave one of them out"
        with pytest.raises(ValueError, match=message):
            make_trainer(CUDAGraph(), other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_a_compiled_model_is_refused(make_trainer, stand_in):
    with (
        make_trainer(CUDAGraph(), build=net, compile=True) as trainer,
        pytest.raises(ValueError, match="CUDAGraph cannot record a compiled model: leave out"),
    ):
        trainer.fit()


def test_a_cpu_is_refused(make_trainer):
    with pytest.raises(ValueError, match="CUDAGraph needs a CUDA device, not cpu: leave it out"):
        make_trainer(CUDAGraph())
