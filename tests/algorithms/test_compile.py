from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel, LanguageModel
from runner.algorithms import ActivationCheckpointing, Compile, LabelSmoothing, StochasticDepth
from runner.algorithms.compile import compile_optimizer
from runner.data import TensorLoader
from runner.distributed.blocks import find_repeated
from runner.models import GPT, ResNet8
from runner.optim import Muon
from runner.optim.schedulers import cosine_annealing

# torch itself gives these warnings while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_repeated_blocks_are_found_inside_their_wrappers(make_trainer, resnet):
    with make_trainer(StochasticDepth("BasicBlock"), build=resnet) as trainer:
        names = [*find_repeated(trainer.state.unwrapped_model)]
        assert names == [f"module.blocks.{index}.block" for index in range(3)]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


def net() -> ClassificationModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = Residual(), Residual(), Residual()
        return ClassificationModel(nn.Sequential(nn.Flatten(), nn.Linear(32, 6), *blocks, nn.Linear(6, 3)).double(), 3)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run traced graphs without compiling them, because compiling takes seconds."""
    from torch._inductor import compile_fx

    torch._dynamo.reset()
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, **_: graph.forward)


@pytest.fixture
def count_graphs() -> Callable[[], int]:
    """Return a function that counts the graphs compiled in this test."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_equal_blocks_share_one_graph_and_train_the_same(train, count_graphs):
    options = {"build": net, "max_duration": "2ba", "eval_interval": 0}
    compiled = train(Compile(), **options)
    assert count_graphs() == 1
    torch.testing.assert_close(compiled.gradients, train(**options).gradients)


def wide() -> ClassificationModel:
    """Return a model whose blocks have different widths but share one recompilation limit."""
    return ClassificationModel(ResNet8(in_channels=2, num_classes=3, width=4), 3).double()


def gpt() -> LanguageModel:
    return LanguageModel(GPT(vocab_size=11, context=8, d_model=8, n_layers=2, n_heads=2))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.arange(15 * 8).view(15, 8) % 11, torch.arange(15 * 8).view(15, 8) % 7


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(15, 2, 6, 6, dtype=torch.float64), torch.arange(15) % 3


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model", "step"])
@pytest.mark.parametrize(("build", "make_data"), [(wide, images), (gpt, tokens)])
def test_nothing_is_compiled_after_the_first_epoch_and_evaluation(
    make_trainer, count_graphs, build: Callable, make_data: Callable, scope: str, uncompiled
):
    from torch._dynamo.utils import counters

    class Count(Callback):
        def __init__(self) -> None:
            self.graphs: list[int] = []

        def eval_end(self, state, logger):
            self.graphs.append(count_graphs())

    count, data = Count(), make_data()
    with make_trainer(
        Compile(scope=scope),
        build=build,
        train_dataloader=TensorLoader(*data, batch_size=4, shuffle=True),  # the last batch has 3 samples
        eval_dataloader=TensorLoader(*data, batch_size=6, shuffle=False),
        schedulers=cosine_annealing(t_warmup="6ba"),
        max_duration="3ep",
        callbacks=[count],
    ) as trainer:
        trainer.fit()
    assert count.graphs[0] > 0 and {*count.graphs} == {count.graphs[0]}
    # With scope='step', torch does not compile the frame that disables gradients around the optimizer's step.
    assert counters["frames"]["total"] - counters["frames"]["ok"] == (scope == "step")


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "muon": lambda model: Muon(model, lr=0.02),
    "muon_fused": lambda model: Muon(model, lr=0.02, fused=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon_fused", "fused", "muon"])
def test_a_compiled_step_trains_the_same_with_a_warmup_from_zero(make_trainer, uncompiled, language, name: str):
    class History(Callback):
        def __init__(self) -> None:
            self.losses: list[Tensor] = []
            self.rates: list[float] = []

        def batch_end(self, state, logger):
            self.losses.append(state.total_loss)
            self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    def run(*algorithms: Algorithm) -> History:
        history, schedule = History(), cosine_annealing(t_warmup="3ba")
        options = {**language, "optimizers": OPTIMIZERS[name], "schedulers": schedule, "max_duration": "2ep"}
        with make_trainer(*algorithms, callbacks=[history], **options) as trainer:
            trainer.fit()
        return history

    compiled, plain = run(Compile(scope="step")), run()
    assert compiled.rates == plain.rates and compiled.rates[0] == 0.0  # rates are tensors only during the step
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-5, atol=0)  # Adam divides in a different order


def test_a_compiled_optimizer_is_not_recompiled_for_new_learning_rates(uncompiled, count_graphs):
    def step(compiles: bool) -> Tensor:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([weight], foreach=True)
        if compiles:
            compile_optimizer(optimizer, "default")
        for rate in (0.0, 0.1, 0.05, 0.2):
            # Zeros, because Adam would divide 0 by 0 for them if the rate were a tensor with the value 0.
            weight.grad = torch.tensor([0.0, 1.0, -1.0, 0.0])
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(step(True), step(False))
    assert count_graphs() == 1


def test_the_matrix_update_of_muon_is_compiled_if_its_fallback_is_fused(uncompiled, count_graphs):
    model = nn.Linear(4, 4)
    optimizer = Muon(model, lr=0.02, fused=True)
    compile_optimizer(optimizer, "default")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert count_graphs() > 0


@pytest.mark.slow
def test_a_compiled_step_resumes_bit_for_bit(check_resume, uncompiled):
    check_resume(lambda: [Compile(scope="step")], build=net, optimizers=OPTIMIZERS["adamw"])


def test_torch_schedulers_do_not_miss_the_steps_of_a_compiled_optimizer(make_trainer, uncompiled, recwarn):
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    options = {"schedulers": halving, "step_schedulers_every_batch": True, "max_duration": "2ba"}
    with make_trainer(Compile(scope="step"), build=net, **options) as trainer:
        before = trainer.state.optimizers[0].param_groups[0]["lr"]
        trainer.fit()
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == before / 4
    assert not [warning for warning in recwarn if "`optimizer.step()`" in str(warning.message)]


def test_runs_whose_model_and_loss_cannot_be_compiled_together_are_refused(make_trainer):
    with pytest.raises(ValueError, match="scope='step': LabelSmoothing acts between the forward pass and the loss"):
        make_trainer(Compile(scope="step"), LabelSmoothing(), build=net)

    class OwnStep(ClassificationModel):
        def metrics(self, train):
            return {}

        def training_step(self, state):
            return self.loss(self(state.microbatch), state.microbatch)

    with pytest.raises(ValueError, match="scope='step': OwnStep has its own training_step; use scope='model'"):
        make_trainer(Compile(scope="step"), build=lambda: OwnStep(net().module, 3))


@pytest.mark.slow
def test_scope_model_compiles_the_whole_model(train, count_graphs):
    options = {"max_duration": "2ba", "eval_interval": 0}
    compiled = train(Compile(scope="model"), **options)
    assert count_graphs() == 1
    torch.testing.assert_close(compiled.gradients, train(**options).gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_other",
    [
        lambda: StochasticDepth("Residual", drop_rate=0.5),
        lambda: ActivationCheckpointing("Residual"),
    ],
    ids=["stochastic_depth", "activation_checkpointing"],
)
def test_compile_composes_with_other_changes_to_blocks(make_trainer, count_graphs, make_other: Callable[[], Algorithm]):
    def run(*algorithms: Algorithm) -> dict[str, Tensor]:
        with make_trainer(*algorithms, build=net, max_duration="3ba", eval_dataloader=None) as trainer:
            trainer.fit()
            return trainer.state.unwrapped_model.state_dict()

    compiled = run(Compile(), make_other())
    assert count_graphs() >= 1
    torch.testing.assert_close(compiled, run(make_other()))  # includes running statistics


def test_weights_keep_their_names(make_trainer, resnet):
    with make_trainer(Compile(), build=resnet) as trainer:
        assert [*trainer.state.unwrapped_model.state_dict()] == [*resnet().state_dict()]


def test_a_model_without_repeated_blocks_is_refused(make_trainer, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ValueError, match="scope='block': the model has no repeated block"):
        make_trainer(Compile())
    with caplog.at_level("INFO", "runner"):
        make_trainer(Compile(scope="model")).close()
    assert "Compile changed" not in caplog.text  # there are no blocks to name


@pytest.mark.parametrize("scope", ["block", "model", "step"])
def test_a_second_compilation_by_the_trainer_is_refused(make_trainer, scope: str):
    with (
        make_trainer(Compile("max-autotune", scope), build=net, compile=True) as trainer,
        pytest.raises(ValueError, match="Compile already compiles the model, in its own mode: leave out"),
    ):
        trainer.fit()


def test_a_missing_compiler_is_reported_at_the_start(make_trainer, resnet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="Compile needs a C\\+\\+ compiler for the CPU, and 'no-such-compiler'"):
        make_trainer(Compile(), build=resnet)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="mode='fast'"):
        Compile("fast")
    with pytest.raises(ValueError, match="scope='layer'"):
        Compile(scope="layer")


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["block", "model", "step"])
def test_cuda_graphs_train_and_evaluate_the_same(train, scope: str):
    options = {"build": net, "max_duration": "4ba", "eval_interval": "2ba", "device": "cuda"}
    compiled = train(Compile("reduce-overhead", scope), **options)
    torch.testing.assert_close(compiled.gradients, train(**options).gradients)


@pytest.mark.gpu
def test_cuda_graphs_refuse_to_accumulate_gradients(make_trainer, resnet):
    with pytest.raises(ValueError, match="mode='reduce-overhead': CUDA graphs cannot accumulate gradients"):
        make_trainer(Compile("reduce-overhead"), build=resnet, grad_accum=2, device="cuda")
