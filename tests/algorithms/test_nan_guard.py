from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from observers import SaveAt, warnings_of
from rank_runs import program_of
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel, Model, Trainer, get_global_rank, save_checkpoint
from runner.algorithms import EMA, GradientClipping, NaNGuard
from runner.algorithms.nan_guard import all_finite
from runner.callbacks import InMemoryLogger, OptimizerMonitor
from runner.checkpoints.hashing import digest
from runner.data import TensorLoader

SPOILT = (1, 4)  # batches counted from 0, of six


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


class Assigned(nn.Module):
    """Counts its passes in a buffer that it replaces, and averages its inputs in a buffer that it changes in place."""

    def __init__(self):
        super().__init__()
        self.passes = nn.Buffer(torch.tensor(0))
        self.mean = nn.Buffer(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1
            self.mean.lerp_(x.detach().mean(), 0.1)
        return x


class Spoiler(Algorithm):
    """Spoils chosen batches in one of several ways: in the data, in the loss, or only in the gradients."""

    def __init__(self, batches: Sequence[int] = SPOILT, how: str = "inputs"):
        self.batches, self.how = batches, how

    def after_dataloader(self, state, logger):
        if self.how == "inputs" and state.timestamp.batch in self.batches:
            images, targets = state.batch
            images = images.clone()
            images[-1] = math.nan
            state.batch = (images, targets)

    def after_loss(self, state: Any, logger):
        if self.how in ("nan", "inf") and state.timestamp.batch in self.batches:
            state.loss = state.loss + float(self.how)  # the gradients are finite

    def after_backward(self, state: Any, logger):
        if self.how == "gradient" and state.timestamp.batch in self.batches:
            [*state.unwrapped_model.parameters()][-1].grad[0] = math.inf


class LeaveOut(Algorithm):
    """Reference for `skip`: does not step the optimizers at chosen batches, and restores the buffers itself."""

    def __init__(self, batches: Sequence[int] = SPOILT):
        self.batches = batches

    def batch_start(self, state, logger):
        if state.timestamp.batch in self.batches:
            self.buffers = copy.deepcopy(dict(state.unwrapped_model.named_buffers()))
            self.steps = [optimizer.step for optimizer in state.optimizers]
            for optimizer in state.optimizers:
                optimizer.step = lambda *_: 0.0  # type: ignore[method-assign]

    def batch_end(self, state, logger):
        if state.previous_timestamp.batch in self.batches:
            for optimizer, step in zip(state.optimizers, self.steps, strict=True):
                optimizer.step = step
            state.unwrapped_model.load_state_dict(self.buffers, strict=False)


def make_model() -> ClassificationModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.BatchNorm1d(6), Assigned(), nn.Tanh(), nn.Linear(6, 3))
    return ClassificationModel(net.double(), 3)


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return the weights and buffers of the model, and the state of the optimizers."""
    state = trainer.state
    return {
        "model": {name: value.clone() for name, value in state.unwrapped_model.state_dict().items()},
        "optimizers": copy.deepcopy([optimizer.state_dict() for optimizer in state.optimizers]),
    }


def assert_equal(values: Any, expected: Any) -> None:
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


@pytest.fixture
def fit(make_trainer) -> Callable[..., dict[str, Any]]:
    def run(*algorithms: Algorithm, **arguments: Any) -> dict[str, Any]:
        with make_trainer(*algorithms, **({"model": make_model()} | arguments)) as trainer:
            trainer.fit()
            return everything(trainer)

    return run


@pytest.mark.parametrize("how", ["inputs", "nan", "inf", "gradient"])
@pytest.mark.parametrize("grad_accum", [1, 3])
@pytest.mark.parametrize("optimizers", [adam, momentum])
def test_a_skipped_batch_leaves_no_trace(fit, optimizers, grad_accum: int, how: str):
    arguments = {"optimizers": optimizers, "grad_accum": grad_accum}
    guarded = fit(NaNGuard(), Spoiler(how=how), **arguments)
    assert all(value.isfinite().all() for value in guarded["model"].values())
    assert int(guarded["model"]["module.3.passes"]) == 4 * grad_accum
    assert_equal(guarded, fit(LeaveOut(), **arguments))


@pytest.mark.parametrize("batches", [(0,), (0, 1, 2), (5,), (2, 3)])
def test_the_first_last_and_several_batches_are_skipped(fit, batches):
    assert_equal(fit(NaNGuard(), Spoiler(batches)), fit(LeaveOut(batches)))


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_a_finite_run_is_the_same_without_the_guard(fit, policy: str):
    assert_equal(fit(NaNGuard(policy, "2ba")), fit())


class Snapshots(Callback):
    """Stores weights, buffers and optimizer state before each batch and at the end."""

    def __init__(self):
        self.seen: list[dict[str, Any]] = []

    def batch_start(self, state, logger):
        optimizers = copy.deepcopy([optimizer.state_dict()["state"] for optimizer in state.optimizers])
        self.seen.append({"model": copy.deepcopy(state.unwrapped_model.state_dict()), "optimizers": optimizers})

    fit_end = batch_start


@pytest.mark.parametrize("optimizers", [adam, momentum])
@pytest.mark.parametrize(
    ("interval", "batches", "restored"),
    [
        ("2ba", (3,), {4: 2}),
        ("2ba", (4,), {5: 2}),  # no snapshot at a spoilt batch
        ("4ba", (3, 5), {4: 0, 6: 4}),
        ("1ep", (4, 5), {5: 3, 6: 3}),
        ("0.5dur", (5,), {6: 3}),
        ("2ba", (0,), {1: 0}),
    ],
)
def test_rollback_goes_back_to_the_last_snapshot(make_trainer, optimizers, interval, batches, restored: dict[int, int]):
    snapshots = Snapshots()
    algorithms = NaNGuard("rollback", interval), Spoiler(batches)
    with make_trainer(*algorithms, model=make_model(), callbacks=[snapshots], optimizers=optimizers) as trainer:
        trainer.fit()
    for index in range(1, 7):
        if index in restored:
            assert_equal(snapshots.seen[index], snapshots.seen[restored[index]])
        else:
            assert not torch.equal(
                *(snapshot["model"]["module.1.weight"] for snapshot in snapshots.seen[index - 1 : index + 1])
            )


def test_a_snapshot_can_be_restored_twice(make_trainer):
    snapshots = Snapshots()
    arguments = {"callbacks": [snapshots], "optimizers": adam, "max_duration": "8ba"}
    with make_trainer(NaNGuard("rollback", "4ba"), Spoiler((5, 7)), model=make_model(), **arguments) as trainer:
        trainer.fit()
    assert_equal(snapshots.seen[6], snapshots.seen[4])
    assert_equal(snapshots.seen[8], snapshots.seen[4])


def test_learning_rates_follow_their_schedule_through_a_rollback(make_trainer):
    rates = []

    class Rates(Callback):
        def batch_end(self, state, logger):
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    algorithms = NaNGuard("rollback", "2ba"), Spoiler((3,))
    arguments = {"schedulers": halving, "step_schedulers_every_batch": True, "callbacks": [Rates()]}
    with make_trainer(*algorithms, **arguments) as trainer:
        trainer.fit()
    assert rates == [0.1 * 0.5**number for number in range(1, 7)]


@pytest.mark.parametrize(("policy", "interval"), [("skip", "1ba"), ("rollback", "2ba"), ("rollback", "100ba")])
def test_a_run_resumed_at_any_batch_equals_an_uninterrupted_run(make_trainer, tmp_path, policy: str, interval: str):
    def train(**arguments: Any) -> tuple[Any, list[tuple[int, float]]]:
        """Return the final state, with the snapshot, and the logged numbers of skipped batches."""
        memory = InMemoryLogger()
        algorithms = [GradientClipping(), NaNGuard(policy, interval), Spoiler((1, 2, 4)), EMA("2ba")]
        with make_trainer(*algorithms, model=make_model(), optimizers=adam, loggers=[memory], **arguments) as trainer:
            trainer.fit()
        snapshot = trainer.state.algorithms[1].state_dict()["snapshot"]
        assert bool(snapshot) == (policy == "rollback")
        batch = snapshot.get("timestamp", {}).get("batch")  # the rest of the timestamp has times of the clock
        skipped = [(time.batch, value) for time, value in memory.data.get("nan_guard/skipped", [])]
        return [everything(trainer), {**snapshot, "timestamp": batch}], skipped

    expected, expected_skipped = train(callbacks=[SaveAt(tmp_path, *range(1, 6))])
    assert expected_skipped == [(2, 1), (3, 2), (5, 3)]
    for stop in range(1, 6):
        state, skipped = train(resume_path=tmp_path / str(stop))
        assert_equal(state, expected)
        assert skipped == [(batch, count) for batch, count in expected_skipped if batch > stop]


def test_equal_runs_have_equal_snapshots(make_trainer):
    def digest_of_states() -> str:
        with make_trainer(NaNGuard("rollback", "2ba"), Spoiler((3,)), model=make_model()) as trainer:
            trainer.fit()
        return digest([algorithm.state_dict() for algorithm in trainer.state.algorithms])

    assert digest_of_states() == digest_of_states()


@pytest.mark.parametrize(
    ("interval", "expected"), [("2ba", [0, 2, 4]), ("1ep", [0, 3]), ("1iter", [0, 3]), ("16sp", [0, 2, 4]), ("1h", [0])]
)
def test_snapshots_are_taken_at_their_interval(make_trainer, interval: str, expected: list[int]):
    batches = set()

    class Look(Callback):
        def batch_end(self, state, logger):
            batches.add(state.algorithms[0].state_dict()["snapshot"]["batch"])

    with make_trainer(NaNGuard("rollback", interval), callbacks=[Look()], iteration_length="1ep") as trainer:
        trainer.fit()
    assert sorted(batches) == expected


def test_skipped_batches_are_logged_counted_and_warned_about(make_trainer, caplog):
    memory = InMemoryLogger()
    with make_trainer(NaNGuard(), Spoiler(how="inf"), loggers=[memory], max_duration="2ep") as trainer:
        trainer.fit()
    losses = {time.batch: value for time, value in memory.data["loss/train/total"]}
    assert [batch for batch, value in losses.items() if value == math.inf] == [2, 5]
    assert sum(math.isfinite(value) for value in losses.values()) == 4
    assert memory.get_timeseries("nan_guard/skipped") == ([2, 5], [1, 2])
    assert warnings_of(caplog) == [
        "the loss is inf on rank 0, all gradients are finite, epoch 1, batch 2 (both from 1): batch skipped",
        "the loss is inf on rank 0, all gradients are finite, epoch 2, batch 5 (both from 1): batch skipped",
    ]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("inputs", r"the loss is nan on rank 0, the gradient of 'module.1.weight' is not finite, epoch 2, .*batch 5 "),
        ("gradient", r"the loss is \d.\d+ on rank 0, the gradient of 'module.5.bias' is not finite, epoch 2"),
    ],
)
def test_policy_raise_ends_the_run_before_the_optimizer_steps(make_trainer, fit, how: str, message: str):
    before = fit(max_duration="4ba")
    trainer = make_trainer(NaNGuard("raise"), Spoiler((4,), how), model=make_model())
    with pytest.raises(FloatingPointError, match=message), trainer:
        trainer.fit()
    assert_equal(everything(trainer), before)
    assert trainer.state.timestamp.batch == 4


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_too_many_skipped_batches_in_a_row_end_the_run(make_trainer, policy: str):
    with make_trainer(NaNGuard(policy, max_consecutive=2), Spoiler((0, 1, 3, 4))) as trainer:
        trainer.fit()
    trainer = make_trainer(NaNGuard(policy, max_consecutive=2), Spoiler((1, 2, 3, 4)))
    with (
        pytest.raises(FloatingPointError, match="batch 4 .*more than max_consecutive=2 such batches in a row"),
        trainer,
    ):
        trainer.fit()
    assert trainer.state.timestamp.batch == 3


def test_skipped_batches_in_a_row_are_counted_across_a_resume(make_trainer, tmp_path):
    def make(**arguments: Any) -> Trainer:
        return make_trainer(NaNGuard(max_consecutive=2), Spoiler((1, 2, 3)), **arguments)

    with make() as first:
        first.fit(duration="3ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    with pytest.raises(FloatingPointError, match="batch 4 "), make(resume_path=tmp_path / "checkpoint") as second:
        second.fit()


@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
@pytest.mark.parametrize("is_listed_first", [True, False])
def test_the_guard_checks_gradients_before_they_are_clipped(fit, clipping_type: str, is_listed_first: bool):
    def clipping() -> GradientClipping:
        return GradientClipping(clipping_type, 0.1)

    order = [NaNGuard(), clipping()][:: 1 if is_listed_first else -1]
    guarded = fit(*order, Spoiler(how="gradient"), callbacks=[OptimizerMonitor()])
    assert_equal(guarded, fit(clipping(), LeaveOut()))


def test_an_average_continues_after_a_skipped_batch(make_trainer):
    def average(*algorithms: Algorithm) -> dict[str, Any]:
        with make_trainer(*algorithms, EMA("2ba"), model=make_model()) as trainer:
            trainer.fit()
            return trainer.state.algorithms[-1].state_dict() | everything(trainer)

    guarded = average(NaNGuard(), Spoiler())
    expected = average(LeaveOut())
    del guarded["average"]["module.3.passes"], expected["average"]["module.3.passes"]
    assert_equal(guarded, expected)


class TwoNets(Model):
    """Two networks with an optimizer each, an unused parameter, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
        self.first.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.second.bias.requires_grad_(False)

    def forward(self, batch):
        return self.first(batch[0])

    def training_step(self, state):
        losses = {name: getattr(self, name)(state.microbatch[0]).pow(2).mean() for name in ("first", "second")}
        if state.timestamp.batch in SPOILT:
            losses["second"] = losses["second"] * math.nan
        for loss in losses.values():
            (loss * state.loss_scale).backward()
        return losses


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_no_optimizer_steps_if_one_loss_is_not_finite(fit, policy: str):
    arguments = {
        "train_dataloader": TensorLoader(torch.randn(24, 4), batch_size=8, shuffle=False),
        "eval_dataloader": None,
        "optimizers": {"first": adam, "second": momentum},
    }
    guarded = fit(NaNGuard(policy, "1ba"), model=TwoNets(), **arguments)
    assert all(value.isfinite().all() for value in guarded["model"].values())
    if policy == "skip":
        assert_equal(guarded, fit(LeaveOut(), model=TwoNets(), **arguments))
    # Each rollback undoes a step.
    assert guarded["optimizers"][0]["state"][0]["step"] == {"skip": 4, "rollback": 2}[policy]


def half_precision(**arguments: Any) -> dict[str, Any]:
    """Return arguments of `make_trainer` for training in float16 with a loss scaler."""
    generator = torch.Generator().manual_seed(0)
    loader = TensorLoader(torch.randn(24, 32, generator=generator), torch.arange(24) % 3, batch_size=8, shuffle=False)
    torch.manual_seed(0)
    model = ClassificationModel(nn.Sequential(nn.Linear(32, 3), nn.BatchNorm1d(3)), 3)
    return {"model": model, "train_dataloader": loader, "eval_dataloader": None, "precision": "amp_fp16"} | arguments


def test_the_loss_scaler_lowers_its_scale_for_a_skipped_batch(make_trainer):
    with make_trainer(NaNGuard(), Spoiler((1,)), **half_precision()) as trainer:
        trainer.fit()
        assert trainer.state.scaler.get_scale() == 2**15
        assert int(trainer.state.unwrapped_model.state_dict()["module.1.num_batches_tracked"]) == 5
        assert trainer.state.algorithms[0].state_dict()["skipped"] == 1


class AlwaysInfinite(torch.autograd.Function):
    """The identity, with a gradient that is infinite at any loss scale."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * math.inf


def test_overflowing_gradients_are_left_to_the_loss_scaler_while_its_scale_can_fall(make_trainer):
    class Infinite(Algorithm):
        def after_loss(self, state, logger):
            state.loss = AlwaysInfinite.apply(state.loss)

    trainer = make_trainer(NaNGuard("raise"), Infinite(), **half_precision(max_duration="100ba"))
    with pytest.raises(FloatingPointError, match=r"batch 17 \(both from 1\)"), trainer:  # 16 halvings from 2^16 to 1
        trainer.fit()
    assert trainer.state.scaler.get_scale() == 1


def train_on_a_rank() -> None:
    """Train on this rank with a loss of NaN on one rank, compare weights, and print the error of policy='raise'."""
    warnings.simplefilter("error")

    class RankSpoiler(Algorithm):
        def __init__(self, *batches):
            self.batches = batches

        def after_loss(self, state, logger):
            if (get_global_rank(), state.timestamp.batch) in self.batches:
                state.loss = state.loss + math.nan  # type: ignore[operator]  # its gradient is finite

    class WithoutGradients(Algorithm):
        def after_train_batch(self, state, logger):
            if state.timestamp.batch in (1, 3):
                for parameter in state.unwrapped_model.parameters():
                    parameter.grad = None

    def fit(*algorithms, duration="5ba"):
        torch.manual_seed(0)
        model = ClassificationModel(nn.Linear(4, 3), 3)
        loader = TensorLoader(torch.randn(33, 4), torch.arange(33) % 3, batch_size=8, shuffle=True)
        with Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=lambda params: torch.optim.Adam(params, lr=0.1),
            max_duration=duration,
            algorithms=[*algorithms, EMA("2ba")],
            device="cpu",
        ) as trainer:
            trainer.fit()
        return copy.deepcopy(dict(model.named_parameters()))

    # The fifth batch has one sample; on rank 0, its loss has no weight and may be NaN.
    weights = fit(NaNGuard(), RankSpoiler((1, 1), (1, 3), (0, 4)))
    torch.testing.assert_close(weights, fit(WithoutGradients()), rtol=0, atol=0)
    rolled_back = fit(NaNGuard("rollback", "2ba"), RankSpoiler((1, 5)), duration="6ba")
    torch.testing.assert_close(rolled_back, fit(duration="4ba"), rtol=0, atol=0)
    try:
        fit(NaNGuard("raise"), RankSpoiler((1, 3)))
    except FloatingPointError as error:
        print(error)


def test_ranks_decide_alike_if_the_loss_of_one_rank_is_not_finite(run_ranks):
    finished = run_ranks(program_of("algorithms/test_nan_guard", "train_on_a_rank"))
    message = "the loss is nan on rank 1, all gradients are finite, epoch 1, batch"
    assert all(f"{message} 4 (both from 1). Lower the learning rate" in rank.stdout for rank in finished)
    warnings = [line for line in finished[0].stderr.splitlines() if "the loss is" in line]
    assert warnings == [f"{message} {batch} (both from 1): batch skipped" for batch in (2, 4)] + [
        "the loss is nan on rank 1, all gradients are finite, epoch 2, batch 6 (both from 1): "
        "rolled back to the weights after batch 4"
    ]
    assert "the loss is" not in finished[1].stderr


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_detects_a_single_bad_element(dtype: torch.dtype, bad: float):
    for size in (1, 7, 1000):
        for index in {0, size // 2, size - 1}:
            tensor = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
            assert all_finite([torch.zeros(()), tensor, torch.empty(0)])
            tensor[index] = bad
            assert not all_finite([torch.zeros(()), tensor, torch.empty(0)])


def test_sparse_gradients_are_checked(make_trainer):
    class Bag(ClassificationModel):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.EmbeddingBag(10, 3, sparse=True, mode="sum"), 3)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, (24, 4), generator=generator)
    arguments = {
        "train_dataloader": TensorLoader(tokens, torch.arange(24) % 3, batch_size=8, shuffle=False),
        "eval_dataloader": None,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    weights = []
    for algorithms in ([NaNGuard(), Spoiler(how="nan")], [LeaveOut()]):
        with make_trainer(*algorithms, model=Bag(), **arguments) as trainer:
            trainer.fit()
        weights.append(everything(trainer))
    assert_equal(*weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "ignore"}, "policy='ignore': must be one of 'raise', 'skip', 'rollback'"),
        ({"snapshot_interval": "0ba"}, "snapshot_interval='0ba': must be above 0; for no snapshots, use policy='skip'"),
        ({"snapshot_interval": "often"}, "snapshot_interval='often' is not a time"),
        ({"max_consecutive": 0}, "max_consecutive=0"),
        ({"max_consecutive": 2.5}, "max_consecutive=2.5"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        NaNGuard(**arguments)
