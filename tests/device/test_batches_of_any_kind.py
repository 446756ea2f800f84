"""Batches of any kind go through training, evaluation, prediction and `runner check`, and say what they cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batch_kinds
import pytest
import torch
from composed_configs import composed
from tiny_runs import tiny_trainer

from runner import Callback, Trainer
from runner.config import build
from runner.config.experiment import Experiment
from runner.failures.errors import WrongConfig
from runner.training.precision import Precision
from runner.trials import dry_run

KINDS = {
    "detection": ("load_detection", "Detector"),
    "graphs": ("load_graphs", "GraphModel"),
    "a count by the model": ("load_unsized", "CountingModel"),
    "slices": ("load_sliced", "UnsizedModel"),
    "packed sequences": ("load_packed", "PackedModel"),
    "nested tensors": ("load_nested", "NestedModel"),
    "text pairs": ("load_text_pairs", "TextPairs"),
    "two views": ("load_views", "Views"),
    "a table": ("load_table", "Regression"),
}
CANNOT_BE_SPLIT = ("graphs", "a count by the model", "packed sequences")


class GivePolicy(Callback):
    def fit_start(self, state: Any, logger: Any) -> None:
        state.train_dataloader.policy = state.unwrapped_model.layer


batch_kinds.GivePolicy = GivePolicy  # type: ignore[attr-defined]


def make_trainer(kind: str, **arguments: Any) -> Trainer:
    load, model = (getattr(batch_kinds, name) for name in KINDS[kind])
    train, evaluation = load()[:2]
    if "model" not in arguments:
        arguments["model"] = model()
    return tiny_trainer(
        train_dataloader=train,
        eval_dataloader=evaluation,
        max_duration="2ep",
        **arguments,
    )


def config_of(load: str, model: str, **trainer: Any) -> dict[str, Any]:
    config = composed("algorithms=none", "callbacks=none")
    config["data"] = {"_target_": f"batch_kinds.{load}"}
    config["model"] = {"_target_": f"batch_kinds.{model}"}
    config["trainer"] |= trainer
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_batch_is_trained_evaluated_and_predicted(kind: str):
    with make_trainer(kind) as trainer:
        before = {name: one.clone() for name, one in trainer.state.unwrapped_model.state_dict().items()}
        trainer.fit()
        state = trainer.state
        samples = len(state.train_dataloader.dataset) if kind != "a table" else 40  # type: ignore[union-attr]
        assert state.timestamp.sample == 2 * samples
        assert state.eval_timestamp.sample == 12
        assert set(state.eval_metric_values["eval"]) == {"mean", "loss"}
        assert not torch.equal(before["layer.weight"], state.unwrapped_model.state_dict()["layer.weight"])
        outputs = torch.cat(trainer.predict(state.evaluators[0].dataloader))
        assert outputs.shape == (12, 1)
        assert float(outputs.mean()) == pytest.approx(float(state.eval_metric_values["eval"]["mean"]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_split_gives_the_same_weights_and_what_cannot_says_what_to_do(kind: str):
    def train(**how: Any) -> Any:
        with make_trainer(kind, **how) as trainer:
            trainer.fit()
        return trainer.state.unwrapped_model.state_dict()["layer.weight"]

    if kind in CANNOT_BE_SPLIT:
        with pytest.raises(
            (TypeError, ValueError), match=r"cannot split a batch .*override Model.slice_batch, or use gr"
        ):
            train(grad_accum=2)
    else:
        torch.testing.assert_close(train(microbatch_size=3), train())


def test_a_model_that_splits_its_batches_gives_the_same_weights():
    found = []
    for grad_accum in (1, 3):
        with make_trainer("graphs", model=batch_kinds.SplittingGraphModel(), grad_accum=grad_accum) as trainer:
            trainer.fit()
        found.append(trainer.state.unwrapped_model.state_dict()["layer.weight"])
    torch.testing.assert_close(*found)


class CountingDetector(batch_kinds.Detector):
    whole_batches = 0

    @property
    def loss_averages(self) -> Any:
        return "samples"  # so that nobody counts the halves of the first batch

    def num_samples(self, batch: Any) -> int:
        samples = super().num_samples(batch)
        self.whole_batches += samples == batch_kinds.BATCH
        return samples


def test_a_batch_is_counted_equally_often_however_many_microbatches_it_has():
    counts = []
    for grad_accum in (2, 4):
        model = CountingDetector()
        with make_trainer("detection", model=model, grad_accum=grad_accum) as trainer:
            trainer.fit()
        counts.append(model.whole_batches)
    assert counts[0] == counts[1]


def test_a_batch_that_nobody_can_count_says_what_to_do():
    with (
        pytest.raises(
            TypeError, match=r"batch of type Unsized.*to\(device\) and len\(\); otherwise override Model.num_s"
        ),
        make_trainer("a count by the model", model=batch_kinds.UnsizedModel()) as trainer,
    ):
        trainer.fit()


def test_an_object_is_not_cast_silently():
    with pytest.raises(TypeError, match=r"a batch holds a GraphBatch: precision='bf16' and some algorithms"):
        Precision("bf16").cast((batch_kinds.join([1, 2]), torch.zeros(2)))


@pytest.mark.parametrize("kind", KINDS)
def test_check_sends_any_kind_of_batch_through_all_events(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(*KINDS[kind])
    build.check(Experiment(config))
    findings = dry_run.try_out(Experiment(config))
    assert findings.device == "cpu" and findings.batch
    if kind == "graphs":
        assert findings.batch == "GraphBatch of 4"


@pytest.mark.parametrize("load", ["load_endless", "load_rollouts"])
def test_check_gives_a_loader_what_training_gives_it(load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(load, "Plain", max_duration="20ba", eval_interval="10ba")
    config["callbacks"] = {"policy": {"_target_": "batch_kinds.GivePolicy"}}
    build.check(Experiment(config))
    assert dry_run.try_out(Experiment(config)).batch == "float32 (4, 3)"
    with build.build(Experiment(config), tmp_path / "run", "run") as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 20
    if load == "load_rollouts":
        del config["callbacks"]["policy"]
        with pytest.raises(WrongConfig, match="'NoneType' object is not callable"):
            dry_run.try_out(Experiment(config))


def test_an_endless_loader_resumes_where_it_stopped(tmp_path: Path):
    def run(duration: str, **arguments: Any) -> Any:
        from runner import save_checkpoint

        train, evaluation = batch_kinds.load_endless()
        with tiny_trainer(
            model=batch_kinds.Plain(),
            train_dataloader=train,
            eval_dataloader=evaluation,
            max_duration=duration,
            eval_interval="4ba",
            **arguments,
        ) as trainer:
            trainer.fit()
            save_checkpoint(trainer.state, tmp_path / duration)
        return trainer.state.unwrapped_model.state_dict()

    whole = run("10ba")
    run("6ba")
    torch.testing.assert_close(run("40sp", resume_path=tmp_path / "6ba"), whole, rtol=0, atol=0)
