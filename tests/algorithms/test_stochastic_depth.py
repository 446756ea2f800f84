from __future__ import annotations

from itertools import product

import pytest
import torch
from observers import SaveAt
from torch import Tensor, nn
from torch._dynamo import config, reset
from torch._dynamo.utils import counters

from runner import Callback, ClassificationModel, stream_seed
from runner.algorithms import LAWA, StochasticDepth
from runner.algorithms._stochastic_block import StochasticBlock, draw_kept, drop_rates
from runner.callbacks import InMemoryLogger

KEY = "stochastic_depth"


def test_drop_rates_rise_linearly_or_are_uniform():
    assert drop_rates(4, 0.5, "linear") == [0.125, 0.25, 0.375, 0.5]
    assert drop_rates(3, 0.5, "uniform") == [0.5, 0.5, 0.5]


def test_blocks_are_kept_independently_with_their_probability():
    kept = draw_kept([0.0, 0.2, 0.7, 1.0], 20_000, seed=1).double()
    torch.testing.assert_close(
        kept.mean(1), torch.tensor([1.0, 0.8, 0.3, 0.0], dtype=torch.float64), atol=0.015, rtol=0
    )
    torch.testing.assert_close((kept[1] * kept[2]).mean(), torch.tensor(0.24, dtype=torch.float64), atol=0.015, rtol=0)


class Residual(nn.Module):
    """Returns x + norm(W x); the running statistics change only when the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class Widening(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.linear(x)], dim=1)


def test_evaluation_equals_the_mean_of_training():
    block = StochasticBlock(Residual().double())
    block.block.norm = nn.Identity()
    block.keeps_shape, block.rate = True, 0.3
    inputs = torch.randn(2, 4, dtype=torch.float64)
    block.kept = True
    kept = block(inputs)
    block.kept = False
    skipped = block(inputs)
    assert torch.equal(skipped, inputs)
    torch.testing.assert_close(block.eval()(inputs), 0.7 * kept + 0.3 * skipped)
    block.rate = 0.0
    assert torch.equal(block(inputs), kept)


def net() -> ClassificationModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = Residual(), Widening(), nn.Linear(8, 4), Residual(), Residual()
        layers = nn.Flatten(), nn.Linear(32, 4), *blocks, nn.Dropout(0.1), nn.Linear(4, 3)
        return ClassificationModel(nn.Sequential(*layers).double(), 3)


class SkippedBlocks(Callback):
    """Stores which blocks each forward pass skipped, by block and sample, and the rates at each evaluation."""

    def __init__(self) -> None:
        self.skipped: list[list[list[bool]]] = []
        self.rates: list[list[float]] = []

    def fit_start(self, state, logger):
        self.blocks = [module for module in state.unwrapped_model.modules() if isinstance(module, StochasticBlock)]
        self.current: list[list[bool]] = []
        for block in self.blocks:
            block.register_forward_hook(self.compare)

    def compare(self, module, inputs, output):
        if module.training:
            same = (output - inputs[0]).flatten(1).abs().sum(1) == 0 if output.shape == inputs[0].shape else None
            self.current.append([] if same is None else same.tolist())

    def before_forward(self, state, logger):
        self.current = []
        self.skipped.append(self.current)

    def eval_start(self, state, logger):
        self.rates.append([block.rate for block in self.blocks])


def expected_kept(rates: list[float], samples: int, batch: int, seed: int = 0) -> list[list[bool]]:
    return draw_kept(rates, samples, stream_seed(seed, KEY, batch)).tolist()


@pytest.mark.parametrize("method", ["block", "sample"])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_blocks_are_skipped_as_drawn(make_trainer, method: str, grad_accum: int):
    record = SkippedBlocks()
    algorithm = StochasticDepth("Residual", method, 0.9, "uniform")
    with make_trainer(algorithm, build=net, callbacks=[record], grad_accum=grad_accum, eval_interval=0) as trainer:
        trainer.fit()
    for index, skipped in enumerate(record.skipped):
        batch, part = divmod(index, grad_accum)
        kept = expected_kept([0.9] * 3, 1 if method == "block" else 8, batch)
        size = 8 // grad_accum
        microbatch = [row * size if method == "block" else row[part * size :][:size] for row in kept]
        assert skipped == [[not is_kept for is_kept in row] for row in microbatch]
    assert len(record.skipped) == 6 * grad_accum
    assert any(any(row) for rows in record.skipped for row in rows)


def test_a_block_that_changes_shape_is_never_skipped(make_trainer):
    record = SkippedBlocks()
    with make_trainer(StochasticDepth("Widening", drop_rate=1.0), build=net, callbacks=[record]) as trainer:
        trainer.fit()
    assert record.skipped == [[[]]] * 6


def test_a_drop_rate_of_zero_changes_nothing(train):
    for method in ("block", "sample"):
        dropped = train(StochasticDepth("Residual", method, 0.0), build=net)
        torch.testing.assert_close(dropped.gradients, train(build=net).gradients, rtol=0, atol=0)


def test_loading_sets_rates_and_leaves_modules_and_parameters_in_place(make_trainer):
    class Before(Callback):
        def before_load(self, state, logger):
            self.objects = [*state.unwrapped_model.modules(), *state.unwrapped_model.parameters()]

    before = Before()
    with make_trainer(StochasticDepth("Residual", "block", 0.5), build=net, callbacks=[before]) as trainer:
        model = trainer.state.unwrapped_model
        after = [*model.modules(), *model.parameters()]
        assert len(after) == len(before.objects)
        assert all(new is old for new, old in zip(after, before.objects, strict=True))
        assert 0.5 in [getattr(module, "rate", 0.0) for module in model.modules()]


def test_a_skipped_block_does_not_run_and_gets_gradients_of_zero(make_trainer):
    with make_trainer(StochasticDepth("Residual", "block", 1.0, "uniform"), build=net) as trainer:
        trainer.fit()
        for module in trainer.state.unwrapped_model.modules():
            if isinstance(module, Residual) and not isinstance(module, Widening):
                assert module.norm.num_batches_tracked == 0
                assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())


def test_rates_rise_in_the_warmup_and_apply_to_evaluations(make_trainer):
    record = SkippedBlocks()
    algorithm = StochasticDepth("Residual", drop_rate=0.3, drop_distribution="uniform", drop_warmup="4ba")
    with make_trainer(algorithm, build=net, callbacks=[record], eval_interval="2ba") as trainer:
        trainer.fit()
    torch.testing.assert_close([rates[0] for rates in record.rates], [0.15, 0.3, 0.3])


@pytest.mark.parametrize("target", ["Residual", f"{__name__}.Residual"])
def test_blocks_are_found_by_the_name_of_their_class(make_trainer, target: str):
    with make_trainer(StochasticDepth(target), build=net) as trainer:
        blocks = [module for module in trainer.state.unwrapped_model.modules() if isinstance(module, StochasticBlock)]
        assert [type(block.block) for block in blocks] == [Residual] * 3


@pytest.mark.parametrize(
    "arguments",
    [{"method": "batch"}, {"drop_rate": 1.5}, {"drop_distribution": "even"}, {"drop_warmup": "soon"}],
)
def test_wrong_arguments_are_refused(arguments: dict):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        StochasticDepth("Residual", **arguments)


def test_a_model_without_such_blocks_is_refused(make_trainer):
    with pytest.raises(ValueError, match="StochasticDepth found no block of class 'Bottleneck'"):
        make_trainer(StochasticDepth("Bottleneck"), build=net)
    make_trainer(StochasticDepth("Bottleneck", allow_no_match=True), build=net).close()


@pytest.mark.parametrize("method", ["block", "sample"])
def test_a_resumed_run_is_bit_identical(check_resume, method: str):
    check_resume(lambda: [StochasticDepth("Residual", method, 0.5, drop_warmup="3ba")], build=net)


@pytest.mark.parametrize("warmup", ["0dur", "1dur"])
def test_an_average_has_the_same_statistics_after_a_resume(make_trainer, tmp_path, warmup: str):
    def run(**arguments):
        memory = InMemoryLogger()
        algorithms = [LAWA(update_interval="4ba"), StochasticDepth("Residual", drop_rate=0.9, drop_warmup=warmup)]
        with make_trainer(
            *algorithms,
            build=net,
            callbacks=[SaveAt(tmp_path, 5, 7)],
            loggers=[memory],
            max_duration="7ba",
            eval_interval="1ba",
            **arguments,
        ) as trainer:
            trainer.fit(may_be_over=True)
        weights = torch.load(tmp_path / "7" / "model.pt", weights_only=True)
        return [float(value) for _, value in memory.data.get("loss/eval/total", [])], weights

    losses, weights = run()
    for batch in (5, 7):
        resumed_losses, resumed_weights = run(resume_path=tmp_path / str(batch))
        assert resumed_losses == losses[batch:]
        torch.testing.assert_close(resumed_weights, weights, rtol=0, atol=0)


def test_a_compiled_model_is_not_recompiled_for_each_set_of_blocks():
    blocks = [StochasticBlock(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(5)]
    model = nn.Sequential(nn.Linear(3, 3), *blocks)
    inputs = torch.randn(2, 3)
    model(inputs)  # blocks learn in their first pass that they keep the shape
    reset()
    counters.clear()
    model.compile(backend="eager")
    with config.patch(fail_on_recompile_limit_hit=True):
        for kept in product((True, False), repeat=len(blocks)):
            for block, is_kept in zip(blocks, kept, strict=True):
                block.kept = is_kept
            outputs, expected = model(inputs), nn.Sequential.forward(model, inputs)
            torch.testing.assert_close(outputs, expected)
    assert counters["stats"]["unique_graphs"] < 20  # for 32 sets of blocks
