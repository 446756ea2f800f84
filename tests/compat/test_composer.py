"""Callbacks and algorithms written for Composer work once their import is changed, or errors say what to use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composer_hooks as hooks
import pytest
import torch
from loop_runs import PER_EPOCH, make_data
from torch import nn

from runner import Callback as RunnerCallback
from runner import ClassificationModel, Trainer
from runner.callbacks import InMemoryLogger
from runner.compat import composer
from runner.core.hooks import Algorithm as RunnerAlgorithm
from runner.optim.schedulers import linear

BATCHES = 2 * PER_EPOCH


def make_trainer(*plug_ins: Any, **arguments: Any) -> Trainer:
    """Return a Trainer for two epochs with callbacks and algorithms."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Linear(3, 2), 2),
        "train_dataloader": make_data(),
        "eval_dataloader": make_data(2),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "schedulers": linear(),
        "max_duration": "2ep",
        "callbacks": [plug_in for plug_in in plug_ins if not isinstance(plug_in, RunnerAlgorithm)],
        "algorithms": [plug_in for plug_in in plug_ins if isinstance(plug_in, RunnerAlgorithm)],
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


class TrainedRun:
    """A run, trained when it is made, with its logged values and final weights."""

    def __init__(self, *plug_ins: Any, **arguments: Any) -> None:
        self.memory = InMemoryLogger()
        with make_trainer(*plug_ins, loggers=[self.memory], **arguments) as trainer:
            trainer.fit()
        self.trainer = trainer
        self.state = trainer.state
        self.weights = [weight.detach().clone() for weight in trainer.state.unwrapped_model.parameters()]

    def logged(self, key: str) -> list[float]:
        return [value for _, value in self.memory.data[key]]

    def has_same_weights_as(self, other: TrainedRun) -> bool:
        return all(map(torch.equal, self.weights, other.weights))


@pytest.fixture(scope="module")
def plain() -> TrainedRun:
    return TrainedRun()


# Callbacks: each records or logs the expected values, and does not change training


def case(make: Callable[[], Any], check: Callable[[Any, TrainedRun], bool]) -> Any:
    """Return a test case, named after the class of the callback."""
    return pytest.param(make, check, id=make().__class__.__name__)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        case(hooks.EveryNBatches, lambda callback, run: callback.seen == [3, 6]),
        case(
            hooks.EventCounter,
            lambda callback, run: (
                callback.counts[composer.Event.BATCH_END] == BATCHES
                and callback.counts["eval_start"] == 2
                and len(run.logged("events")) == 2
            ),
        ),
        case(hooks.LRMonitor, lambda callback, run: run.logged("lr/group0") == [0.1 * (1 - n / 8) for n in range(8)]),
        case(
            hooks.SpeedMonitor,
            lambda callback, run: (
                run.logged("throughput/samples") == [4] * 6 and min(run.logged("throughput/samples_per_sec")) > 0
            ),
        ),
        case(hooks.NaNMonitor, lambda callback, run: True),
        case(hooks.GradMonitor, lambda callback, run: len(run.logged("l2_norm/grad/global")) == BATCHES),
        case(hooks.DeviceMonitor, lambda callback, run: run.memory.hyperparameters == {"device": "cpu", "type": "cpu"}),
        case(
            hooks.ImageLogger,
            lambda callback, run: (
                [(entry["images"].shape, str(entry["images"].dtype)) for entry in run.memory.images["inputs"]]
                == [((2, 1, 3, 1), "uint8")]
            ),
        ),
        case(
            hooks.TableLogger,
            lambda callback, run: (
                [row[0] for row in run.memory.tables["results"]["rows"]] == ["MulticlassAccuracy", "loss"]
            ),
        ),
        case(
            hooks.Progress,
            lambda callback, run: callback.lines[0] == "0.125 0.25 train" and callback.lines[-1] == "1.000 1.00 train",
        ),
        case(
            hooks.OutputCollector,
            lambda callback, run: callback.batches == [1, 2] * 2 and callback.outputs[0].shape == (2, 2),
        ),
        case(hooks.CloseRecorder, lambda callback, run: callback.closed == ["fit_end 8ba", "close 8ba", "post_close"]),
        case(
            hooks.LossLogger,
            lambda callback, run: (
                run.logged("copy/loss") == run.logged("copy/total") == run.logged("loss/train/total")
                and run.logged("copy/MulticlassAccuracy") == run.logged("metrics/train/MulticlassAccuracy")
            ),
        ),
    ],
)
def test_a_callback_works_without_changing_training(
    make: Callable[[], Any], check: Callable[[Any, TrainedRun], bool], plain: TrainedRun
):
    callback = make()
    run = TrainedRun(callback)
    assert check(callback, run)
    assert run.has_same_weights_as(plain)


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda: hooks.EarlyStopper("MulticlassAccuracy", "eval", patience=1), 8),
        (lambda: hooks.EarlyStopper("MulticlassAccuracy", "eval", patience="3ba"), 8),
        (lambda: hooks.ThresholdStopper(-1.0), 4),
        (lambda: hooks.DurationChanger("5ba"), 5),
        (lambda: hooks.DurationChanger("2ba"), 2),
        (lambda: hooks.DurationChanger(5), 20),
        (lambda: hooks.DurationChanger("3e1sp"), 15),
    ],
)
def test_a_callback_can_change_the_length_of_training(make: Callable[[], Any], batches: int):
    run = TrainedRun(make(), max_duration="4ep", schedulers=None)
    assert run.state.timestamp.batch == batches


def test_an_error_in_a_callback_stops_training_and_names_the_callback():
    with pytest.raises(RuntimeError, match=r"contains a NaN") as raised:
        TrainedRun(hooks.LossWeight(math.nan), hooks.NaNMonitor())
    assert "raised by 'nan_monitor' at AFTER_LOSS" in " ".join(raised.value.__notes__)


def test_a_run_resumes_from_a_checkpoint_that_a_callback_saved(tmp_path: Path, plain: TrainedRun):
    saver = hooks.CheckpointSaver("3ba", str(tmp_path / "checkpoints"))
    TrainedRun(saver, hooks.WeightsSaver(str(tmp_path / "last.pt")))
    assert [path.name for path in saver.saved] == ["ep0-ba3", "ep1-ba6"]
    assert TrainedRun(resume_path=saver.saved[0]).has_same_weights_as(plain)
    last = torch.load(tmp_path / "last.pt", weights_only=True)
    assert last["batch"] == "8ba" and torch.equal(last["model"]["module.weight"], plain.weights[0])


# Algorithms: each changes training as expected


def test_gradients_are_clipped(plain: TrainedRun):
    run = TrainedRun(hooks.GradientClipping(0.01), hooks.GradMonitor())
    assert max(run.logged("l2_norm/grad/global")) <= 0.0101 and not run.has_same_weights_as(plain)


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_labels_are_smoothed_for_the_loss_and_restored_for_metrics(grad_accum: int):
    run = TrainedRun(hooks.LabelSmoothing(1.0), grad_accum=grad_accum)  # all targets become uniform
    assert min(run.logged("loss/train/total")) >= math.log(2) - 1e-6
    assert set(run.memory.data) >= {"metrics/train/MulticlassAccuracy"}  # computed from the restored targets


def test_a_layer_is_frozen():
    run = TrainedRun(hooks.LayerFreezing(0.5))
    one_epoch = TrainedRun(max_duration="4ba", schedulers=linear(t_max="8ba"))
    assert [torch.equal(a, b) for a, b in zip(run.weights, one_epoch.weights, strict=True)] == [True, False]


def test_averaged_weights_are_used_only_for_evaluation(plain: TrainedRun):
    average = hooks.EMA(0.5)
    run = TrainedRun(average)
    assert run.has_same_weights_as(plain) and run.logged("loss/eval/total") != plain.logged("loss/eval/total")
    assert str(average.updated) == "8ba"


def test_algorithms_can_change_whole_batches_and_microbatches():
    assert torch.equal(TrainedRun(hooks.CutOut()).weights[0][:, 0], initial_weight()[:, 0])
    assert torch.equal(TrainedRun(hooks.InputScaling(), grad_accum=2).weights[0], initial_weight())


def initial_weight() -> torch.Tensor:
    return next(make_trainer().state.unwrapped_model.parameters()).detach()


def test_an_algorithm_can_change_the_model_before_its_optimizer_exists(plain: TrainedRun):
    run = TrainedRun(hooks.ModelSurgery())
    assert isinstance([*run.state.unwrapped_model.modules()][-1], nn.Tanh) and not run.has_same_weights_as(plain)


def test_algorithms_can_change_losses_outputs_and_learning_rates(plain: TrainedRun):
    for algorithm in (hooks.LossWeight(0.0), hooks.OutputNoise()):
        assert torch.equal(TrainedRun(algorithm).weights[0], initial_weight())
    zeroed = TrainedRun(hooks.Louder())  # outputs become 0, but keep their gradient
    assert zeroed.logged("loss/train/total") == pytest.approx([math.log(2)] * BATCHES)
    assert not torch.equal(zeroed.weights[0], initial_weight())
    warm_up = hooks.WarmUp("4ba")
    assert not TrainedRun(warm_up).has_same_weights_as(plain) and warm_up.rates == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_an_algorithm_can_enlarge_microbatches(plain: TrainedRun):
    grower = hooks.MicrobatchGrower()
    run = TrainedRun(grower, microbatch_size=1)
    assert grower.sizes == [1] * 8 + [2] * 4
    assert all(map(torch.allclose, run.weights, plain.weights))


# Resuming, two ranks, configs and `explain`

PLUG_INS = (
    hooks.EMA,
    hooks.GradientClipping,
    hooks.LabelSmoothing,
    lambda: hooks.EarlyStopper("MulticlassAccuracy", "eval"),
)


def test_a_resumed_run_restores_the_state_of_callbacks_and_algorithms(tmp_path: Path):
    def fit(duration: str, **arguments: Any) -> tuple[TrainedRun, list[Any]]:
        plug_ins = [make() for make in PLUG_INS]
        saver = hooks.CheckpointSaver("5ba", str(tmp_path / duration))
        return TrainedRun(*plug_ins, saver, max_duration=duration, schedulers=None, **arguments), plug_ins

    uninterrupted, expected = fit("12ba")
    fit("7ba")
    resumed, actual = fit("12ba", resume_path=tmp_path / "7ba" / "ep1-ba5")
    assert resumed.has_same_weights_as(uninterrupted)
    assert resumed.logged("loss/eval/total") == uninterrupted.logged("loss/eval/total")[1:]
    assert all(map(torch.equal, actual[0].average.values(), expected[0].average.values()))
    assert actual[0].updated == expected[0].updated == "12ba" and isinstance(actual[0].updated, composer.Time)
    assert str(actual[3].best_occurred) == "1ep"


def train_on_ranks() -> list[torch.Tensor]:
    """Train with several plug-ins, check collectives, and return the weights. Call it on all ranks."""
    run = TrainedRun(
        *[make() for make in PLUG_INS], hooks.WeightsSaver("last.pt"), hooks.GradMonitor(), hooks.EventCounter()
    )
    with make_trainer() as trainer:
        total = torch.ones(1)
        composer.dist.all_reduce(total)
        composer.dist.broadcast(total, 0)
        assert len(composer.dist.all_gather(total)) == composer.dist.get_world_size() == int(total)
        assert composer.State(trainer.state, "init").is_model_ddp == (int(total) > 1)
    return run.weights


def test_two_ranks_reach_the_same_weights_as_one_process(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    torch.save(train_on_ranks(), tmp_path / "expected.pt")
    program = f"""
        import runpy, sys, torch
        sys.path.append({str(Path(__file__).parents[1] / "support")!r})
        weights = runpy.run_path({__file__!r})["train_on_ranks"]()
        expected = torch.load("expected.pt")
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, expected)), (weights, expected)
    """
    run_ranks(program)
    assert (tmp_path / "last.pt").exists()


def test_composer_hooks_work_from_a_config_and_appear_in_explain(run_here: Any, tmp_path: Path):
    text = Path(hooks.__file__).read_text(encoding="utf-8")
    (tmp_path / "from_composer.py").write_text(text)
    arguments = ["model=mlp", "data.batch_size=400", "trainer.max_duration=2ep", "callbacks=json_lines_logger"]
    arguments += ["hydra.run.dir=run", "algorithms=none"]
    arguments += ["+callbacks.counter._target_=from_composer.EveryNBatches", "+callbacks.counter.n=2"]
    arguments += ["+callbacks.gradients._target_=from_composer.GradMonitor"]
    arguments += ["+algorithms.clip._target_=from_composer.GradientClipping", "+algorithms.clip.clipping_threshold=0.5"]
    explained = json.loads(run_here("explain", *arguments, "--json", code=0).out)["result"]
    runs = {event["event"]: [run["name"] for run in event["runs"]] for event in explained["events"]}
    assert [event for event, names in runs.items() if "counter" in names] == ["batch_end"]
    assert runs["after_train_batch"] == ["clip", "gradients"]
    kinds = {hook["name"]: hook["kind"] for hook in explained["hooks"]}
    assert kinds["counter"] == "callback" and kinds["clip"] == "algorithm"
    run_here("check", *arguments, code=0)
    run_here(*arguments, code=0)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    norms = [
        line["metrics"]["l2_norm/grad/global"] for line in lines if "l2_norm/grad/global" in line.get("metrics", {})
    ]
    assert len(norms) == 6 and max(norms) <= 0.5001


# Errors that say what to use instead


class AtBatchEnd(composer.Callback):
    """Calls a function with the state and the logger at BATCH_END."""

    def __init__(self, act: Callable[[Any, Any], Any]) -> None:
        self.act = act

    def batch_end(self, state, logger):
        self.act(state, logger)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda state, logger: state.timer.batch, "state.timer has no counterpart here: read state.timestamp"),
        (lambda state, logger: state.state_dict(), r"state.state_dict .*save_checkpoint\(state, path\) on all ranks"),
        (lambda state, logger: state.set_dataloader([], "x"), r"state.set_dataloader .*runner.Evaluator"),
        (lambda state, logger: setattr(state, "flag", 1), "state.flag cannot be set here: keep it .* as self.flag"),
        (lambda state, logger: setattr(state, "model", None), "state.model cannot be set here: .*replace_modules"),
        (lambda state, logger: setattr(state, "optimizers", []), "state.optimizers cannot .*: .* a factory"),
        (lambda state, logger: logger.log_images(torch.ones(1, 2, 2), masks={}), "shows masks"),
        (
            lambda state, logger: logger.log_images(torch.ones(3)),
            "images=torch.float32 of shape .*: must be",
        ),
        (lambda state, logger: logger.log_traces({}), "logger.log_traces has no counterpart here: log a table"),
        (lambda state, logger: composer.dist.all_gather_object([]), "would unpickle .*gather or broadcast tensors"),
        (lambda state, logger: state.timestamp.batch < "1ep", "are in different units"),
        (lambda state, logger: state.timestamp.token_in_iteration, "subtract token at ITERATION_START"),
        (lambda state, logger: state.schedulers[0].step(), "scheduler.step has no .*: the loop steps schedules"),
        (lambda state, logger: logger.log_epoch({}), "logger.log_epoch has no .*: call logger.log_metrics"),
        (lambda state, logger: composer.dist.initialize_dist("cpu"), "dist.initialize_dist .*: set launch.nproc_per_"),
    ],
)
def test_errors_for_unsupported_uses_say_what_to_do_instead(act: Callable[[Any, Any], Any], message: str):
    with pytest.raises((AttributeError, ValueError), match=message):
        TrainedRun(AtBatchEnd(act))


def test_base_rates_modes_and_ranks_are_available_under_composers_names(monkeypatch: pytest.MonkeyPatch):
    values: list[Any] = []

    def record(state: Any, logger: Any) -> None:
        (scheduler,) = state.schedulers
        values.append((scheduler.base_lrs, state.deterministic_mode, state.tp_enabled, state.fsdp_device_mesh))

    TrainedRun(AtBatchEnd(record))
    assert values == [([0.1], False, False, None)] * BATCHES
    assert (composer.dist.get_local_world_size(), composer.dist.get_node_rank()) == (1, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert (composer.dist.get_local_world_size(), composer.dist.get_node_rank()) == (8, 2)
    monkeypatch.setenv("GROUP_RANK", "3")  # set by torchrun, and used before SLURM's
    assert composer.dist.get_node_rank() == 3 and composer.dist.is_available()


def test_the_error_for_a_value_that_does_not_exist_yet_names_the_event():
    with make_trainer() as trainer:
        view = composer.State(trainer.state, "fit_start")
        for name in ("batch", "outputs", "loss"):
            with pytest.raises(AttributeError, match=f"state.{name} has no value yet at FIT_START"):
                getattr(view, name)


ABSENT = ["Trainer", "ComposerModel", "Evaluator", "DataSpec", "LoggerDestination", "utils", "algorithms", "Profiler"]


@pytest.mark.parametrize("name", ABSENT)
def test_the_error_for_an_unsupported_import_names_a_replacement(name: str):
    with pytest.raises(ImportError, match=f"runner.compat.composer has no {name}: .*runner|return loaders"):
        exec(f"from runner.compat.composer import {name}")


@pytest.mark.parametrize("name", ["find_unused_parameters", "backwards_create_graph"])
def test_properties_that_change_the_backward_pass_are_rejected_when_the_class_is_defined(name: str):
    with pytest.raises(TypeError, match=f"Mine.{name} has no counterpart here: leave it out"):
        type("Mine", (composer.Algorithm,), {name: property(lambda self: True)})


def test_mistakes_in_hooks_raise_the_same_errors_as_in_other_callbacks():
    with pytest.raises(TypeError, match="did you mean 'batch_end'"):
        type("Mine", (composer.Callback,), {"batch_ends": lambda self, state, logger: None})
    with pytest.raises(TypeError, match="Mine.batch_end cannot be called as batch_end"):
        make_trainer(type("Mine", (composer.Callback,), {"batch_end": lambda self, state: None})())
    with pytest.raises(TypeError, match="define both"):
        make_trainer(type("Mine", (composer.Algorithm,), {"match": lambda self, event, state: True})())
    with pytest.raises(TypeError, match="would never be called"):
        make_trainer(composer.Callback())


def test_the_error_for_a_state_that_cannot_be_saved_says_what_to_return(tmp_path: Path):
    class Mine(composer.Callback):
        def fit_end(self, state: Any, logger: Any):
            composer.save_checkpoint(state, str(tmp_path / "saved"))

        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(TypeError, match=r"Mine.state_dict\(\) cannot be saved: it holds a set; return tensors"):
        TrainedRun(Mine())


def test_callbacks_of_the_runner_do_not_get_composers_view_of_the_state():
    types: list[type] = []

    class PlainCallback(RunnerCallback):
        def batch_end(self, state, logger):
            types.append(type(state))

    run = TrainedRun(PlainCallback(), hooks.EveryNBatches())
    assert {*types} == {type(run.state)}
