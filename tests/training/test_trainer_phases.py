"""Parts of the data, evaluations by rule, and training in phases: in one process, on two ranks, resumed, by config."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import PER_EPOCH, Trace, make_data, make_trainer

from runner import Callback, Evaluator, Trainer
from runner.callbacks import CheckpointSaver, InMemoryLogger


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [one.detach().clone() for one in trainer.state.unwrapped_model.parameters()]


def endless() -> Any:
    """Batches without end, which draw their numbers when they are read."""
    for number in itertools.count():
        yield torch.randn(2, 3) + number, torch.tensor([0, 1])


class Seen(Callback):
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


@pytest.mark.parametrize("make", [make_data, endless], ids=["of this project", "endless"])
def test_a_run_resumed_within_a_subset_sees_the_same_batches(make: Callable[[], Any], tmp_path: Path):
    def run(folder: str, duration: str, **arguments: Any) -> tuple[list[float], list[torch.Tensor]]:
        seen = Seen()
        callbacks = [seen, CheckpointSaver("1ba")]
        arguments = {"train_dataloader": make(), "callbacks": callbacks, "run_dir": tmp_path / folder, **arguments}
        with make_trainer(train_subset_num_batches=3, max_duration=duration, **arguments) as trainer:
            trainer.fit()
            return seen.sums, weights(trainer)

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


def test_some_batches_are_predicted():
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


def test_a_function_decides_when_to_evaluate_and_never_twice_at_a_batch():
    # Batches 4 and 8 end an epoch, where it is asked twice; the last evaluation is that of the final weights.
    assert evaluations(eval_interval=at_powers) == [1, 2, 4, 8, 12]
    assert evaluations(eval_interval=lambda state: False) == [12]
    own = Evaluator("eval", make_data(1), eval_interval=at_powers)
    with make_trainer(trace := Trace(), max_duration="1ep", eval_dataloader=own, eval_interval=0) as trainer:
        trainer.fit()
    assert [batch for _, batch, _ in trace.at("EVAL_START eval")] == [1, 2, 4]


def test_a_resumed_run_evaluates_where_the_whole_one_does(tmp_path: Path):
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
def test_a_function_of_anything_but_the_state_is_refused(wrong: Any):
    with pytest.raises(TypeError, match=r"eval_interval=\S+: must be a time string, or a function of the State"):
        make_trainer(eval_interval=wrong, eval_dataloader=make_data(1))


def test_a_rule_and_a_subset_come_from_the_config(tmp_path: Path, run_here: Any):
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


def test_time_starts_again_with_the_same_weights():
    trace = Trace()
    with make_trainer(trace, max_duration="6ba", eval_dataloader=make_data(1), eval_interval="1ep") as trainer:
        trainer.fit()
        first = weights(trainer)
        trace.take()
        trainer.fit(reset_time=True)
        assert trace.at("BATCH_END")[0][1] == 1 and trace.at("BATCH_END")[-1][1] == 6
        assert trace.at("EVAL_START eval") == [(1, 4, 0), (1, 6, 2)]
        trainer.fit("2ep", reset_time=True)
    assert trainer.state.timestamp.epoch == 2 and str(trainer.state.max_duration) == "2ep"
    assert not all(map(torch.equal, first, weights(trainer)))


def test_a_second_phase_resumes_to_the_bit(tmp_path: Path):
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


def on_ranks() -> list[torch.Tensor]:
    """Two phases of a subset on each rank, with an evaluation by rule between."""
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


def test_two_ranks_train_what_one_does(run_ranks: Any, tmp_path: Path):
    torch.save(on_ranks(), tmp_path / "expected.pt")
    program = f"""
        import runpy, sys, torch
        sys.path.append({str(Path(__file__).parents[1] / "support")!r})
        found = runpy.run_path({__file__!r})["on_ranks"]()
        expected = torch.load("expected.pt")
        assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(found, expected))
    """
    run_ranks(program)
