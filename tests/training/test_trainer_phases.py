"""Subsets of the data, functions as evaluation intervals, and training in phases; on ranks, resumed, from a config."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import PER_EPOCH, Trace, make_data, make_trainer
from rank_runs import program_of

from runner import Callback, Evaluator, Trainer
from runner.callbacks import CheckpointSaver, InMemoryLogger


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.state.unwrapped_model.parameters()]


def endless() -> Any:
    """Yield batches without end, drawn when they are read."""
    for number in itertools.count():
        yield torch.randn(2, 3) + number, torch.tensor([0, 1])


class InputSums(Callback):
    """Records the sum of the inputs of each batch."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def after_dataloader(self, state, logger):
        self.sums.append(float(state.batch[0].sum()))


# train_subset_num_batches


def test_an_epoch_ends_after_the_subset():
    trace = Trace()
    with make_trainer(trace, train_subset_num_batches=3, max_duration="2ep") as trainer:
        trainer.fit()
    assert trainer.state.train_dataloader_len == 3
    assert trace.at("EPOCH_END") == [(1, 3, 0), (2, 6, 0)]


def test_a_subset_larger_than_the_data_is_all_of_it():
    with make_trainer(train_subset_num_batches=100) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == trainer.state.train_dataloader_len == PER_EPOCH


@pytest.mark.parametrize("make", [make_data, endless])
def test_a_run_resumed_within_a_subset_trains_on_the_same_batches(make: Callable[[], Any], tmp_path: Path):
    def run(folder: str, duration: str, **arguments: Any) -> tuple[list[float], list[torch.Tensor]]:
        callback = InputSums()
        callbacks = [callback, CheckpointSaver("1ba")]
        arguments = {"train_dataloader": make(), "callbacks": callbacks, "run_dir": tmp_path / folder, **arguments}
        with make_trainer(train_subset_num_batches=3, max_duration=duration, **arguments) as trainer:
            trainer.fit()
            return callback.sums, weights(trainer)

    whole, expected = run("whole", "8ba")
    first, _ = run("cut", "5ba")
    rest, resumed = run("cut", "8ba", resume_path=tmp_path / "cut")
    assert first + rest == whole and len(rest) == 3
    assert all(map(torch.equal, resumed, expected))


@pytest.mark.parametrize("wrong", [0, -1, True, "3", 2.0])
def test_a_wrong_subset_is_refused(wrong: Any):
    with pytest.raises(
        ValueError, match=f"train_subset_num_batches={wrong!r}: must be a whole number, at least 1, or None for all"
    ):
        make_trainer(train_subset_num_batches=wrong)
    with make_trainer() as trainer, pytest.raises(ValueError, match=f"^subset_num_batches={wrong!r}: must be"):
        trainer.predict(make_data(), subset_num_batches=wrong)


def test_predict_can_be_limited_to_a_subset():
    with make_trainer() as trainer:
        assert len(trainer.predict(make_data())) == PER_EPOCH
        assert len(trainer.predict(make_data(), subset_num_batches=3)) == 3
        assert len(trainer.predict(endless(), subset_num_batches=3)) == 3
        assert trainer.state.predict_timestamp.batch == 3


# A function in place of an interval


def at_powers(state: Any) -> bool:
    return state.timestamp.batch in (1, 2, 4, 8)


def evaluations(**arguments: Any) -> list[int]:
    trace = Trace()
    with make_trainer(trace, max_duration="3ep", eval_dataloader=make_data(1), **arguments) as trainer:
        trainer.fit()
    return [batch for _, batch, _ in trace.at("EVAL_START eval")]


def test_a_function_as_interval_evaluates_at_most_once_after_a_batch():
    # Batches 4 and 8 end an epoch, at which the function is called twice; the last evaluation is of the final weights.
    assert evaluations(eval_interval=at_powers) == [1, 2, 4, 8, 12]
    assert evaluations(eval_interval=lambda state: False) == [12]
    evaluator = Evaluator("eval", make_data(1), eval_interval=at_powers)
    with make_trainer(trace := Trace(), max_duration="1ep", eval_dataloader=evaluator, eval_interval=0) as trainer:
        trainer.fit()
    assert [batch for _, batch, _ in trace.at("EVAL_START eval")] == [1, 2, 4]


def test_a_resumed_run_with_a_function_as_interval_evaluates_after_the_same_batches(tmp_path: Path):
    def run(duration: str, **arguments: Any) -> list[tuple[int, float]]:
        memory = InMemoryLogger()
        arguments = {"callbacks": [CheckpointSaver("1ba")], "run_dir": tmp_path, "loggers": [memory], **arguments}
        arguments |= {"eval_dataloader": make_data(1), "eval_interval": at_powers}
        with make_trainer(max_duration=duration, **arguments) as trainer:
            trainer.fit()
        return [(step.batch, value) for step, value in memory.data["loss/eval/total"]]

    first = run("4ba")
    assert [batch for batch, _ in first + run("9ba", resume_path=tmp_path)] == [1, 2, 4, 8, 9]


class Rule:
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, state: Any) -> bool:
        return state.timestamp.batch == self.batch


@pytest.mark.parametrize("wrong", [lambda: True, lambda state, event: True, Rule])
def test_an_interval_must_be_a_time_or_a_function_of_the_state(wrong: Any):
    with pytest.raises(TypeError, match=r"eval_interval=\S+: must be a time string, or a function of the State"):
        make_trainer(eval_interval=wrong, eval_dataloader=make_data(1))


def test_a_config_can_set_a_subset_and_a_function_as_interval(tmp_path: Path, run_here: Any):
    (tmp_path / "my_rules.py").write_text(
        "class At:\n    def __init__(self, batch):\n        self.batch = batch\n\n"
        "    def __call__(self, state):\n        return state.timestamp.batch == self.batch\n"
    )
    arguments = ["model=mlp", "data.batch_size=100", "trainer.max_duration=2ep", "callbacks=json_lines_logger"]
    arguments += ["trainer.train_subset_num_batches=3", "+trainer.eval_interval._target_=my_rules.At"]
    arguments += ["+trainer.eval_interval.batch=2", "hydra.run.dir=run"]
    run_here("check", *arguments, code=0)
    run_here(*arguments, code=0)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [line.split('"step":')[1].split(",")[0] for line in lines if "loss/eval/total" in line] == ["2", "6"]
    assert "must be a whole number, at least 1" in run_here("trainer.train_subset_num_batches=0", code=2).err
    assert run_here("+trainer.eval_interval._target_=my_rules.Att", code=2).err.startswith("error: trainer.eval_int")


# fit(reset_time=True)


def test_reset_time_starts_again_at_batch_zero_with_the_trained_weights():
    trace = Trace()
    with make_trainer(trace, max_duration="6ba", eval_dataloader=make_data(1), eval_interval="1ep") as trainer:
        trainer.fit()
        before = weights(trainer)
        trace.take()
        trainer.fit(reset_time=True)
        assert trace.at("BATCH_END")[0][1] == 1 and trace.at("BATCH_END")[-1][1] == 6
        assert trace.at("EVAL_START eval") == [(1, 4, 0), (1, 6, 2)]
        trainer.fit("2ep", reset_time=True)
    assert trainer.state.timestamp.epoch == 2 and str(trainer.state.max_duration) == "2ep"
    assert not all(map(torch.equal, before, weights(trainer)))


def test_a_second_phase_can_be_resumed_bit_for_bit(tmp_path: Path):
    def run(folder: str, interrupt: bool) -> list[torch.Tensor]:
        def make(**arguments: Any) -> Trainer:
            callbacks = [CheckpointSaver("1ba", keep=-1)]
            return make_trainer(callbacks=callbacks, run_dir=tmp_path / folder, max_duration="2ep", **arguments)

        with make() as trainer:
            trainer.fit("6ba")
            trainer.fit("3ba" if interrupt else "2ep", reset_time=True)
            if not interrupt:
                return weights(trainer)
        with make(resume_path=tmp_path / folder) as trainer:
            assert trainer.state.timestamp.batch == 3
            trainer.fit()
            return weights(trainer)

    assert all(map(torch.equal, run("whole", False), run("cut", True)))


def train_in_phases() -> list[torch.Tensor]:
    """Train on a subset in two phases, and return the weights."""
    with make_trainer(
        train_subset_num_batches=3,
        eval_dataloader=make_data(2),
        eval_interval=at_powers,
        loggers=[memory := InMemoryLogger()],
    ) as trainer:
        trainer.fit()
        trainer.fit("5ba", reset_time=True)
        assert len(trainer.predict(make_data(), subset_num_batches=2)) == 2
    steps = [step.batch for step, _ in memory.data.get("loss/eval/total", [])]
    assert steps in ([], [1, 2, 3, 1, 2, 4, 5])
    return weights(trainer)


def compare_on_ranks() -> None:
    torch.testing.assert_close(train_in_phases(), torch.load("expected.pt"), rtol=1e-5, atol=1e-6)


def test_two_ranks_train_the_weights_of_a_single_process(run_ranks: Any, tmp_path: Path):
    torch.save(train_in_phases(), tmp_path / "expected.pt")
    run_ranks(program_of("training/test_trainer_phases", "compare_on_ranks"))
