"""Models train, evaluate and predict on batches of many kinds; what cannot be split is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batch_kinds
import pytest
import torch
from composed_configs import composed
from tiny_runs import tiny_trainer

from runner import Callback, Trainer, save_checkpoint
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
    return tiny_trainer(train_dataloader=train, eval_dataloader=evaluation, max_duration="2ep", **arguments)


def config_of(load: str, model: str, **trainer: Any) -> dict[str, Any]:
    config = composed("algorithms=none", "callbacks=none")
    config["data"] = {"_target_": f"batch_kinds.{load}"}
    config["model"] = {"_target_": f"batch_kinds.{model}"}
    config["trainer"] |= trainer
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_evaluates_and_predicts_on_any_kind_of_batch(kind: str):
    with make_trainer(kind) as trainer:
        before = trainer.state.unwrapped_model.state_dict()["layer.weight"].clone()
        trainer.fit()
        state = trainer.state
        samples = len(state.train_dataloader.dataset) if kind != "a table" else 40  # type: ignore[union-attr]
        assert state.timestamp.sample == 2 * samples
        assert state.eval_timestamp.sample == 12
        assert set(state.eval_metric_values["eval"]) == {"mean", "loss"}
        assert not torch.equal(before, state.unwrapped_model.state_dict()["layer.weight"])
        outputs = torch.cat(trainer.predict(state.evaluators[0].dataloader))
        assert outputs.shape == (12, 1)
        assert float(outputs.mean()) == pytest.approx(float(state.eval_metric_values["eval"]["mean"]))


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_give_the_weights_of_whole_batches_or_an_error_with_a_remedy(kind: str):
    def train(**arguments: Any) -> Any:
        with make_trainer(kind, **arguments) as trainer:
            trainer.fit()
        return trainer.state.unwrapped_model.state_dict()["layer.weight"]

    if kind in CANNOT_BE_SPLIT:
        message = r"cannot split a batch .*override Model.slice_batch, or use gr"
        with pytest.raises((TypeError, ValueError), match=message):
            train(grad_accum=2)
    else:
        torch.testing.assert_close(train(microbatch_size=3), train())


def test_a_model_can_split_its_batches_into_microbatches():
    weights = []
    for grad_accum in (1, 3):
        with make_trainer("graphs", model=batch_kinds.SplittingGraphModel(), grad_accum=grad_accum) as trainer:
            trainer.fit()
        weights.append(trainer.state.unwrapped_model.state_dict()["layer.weight"])
    torch.testing.assert_close(*weights)


class CountingDetector(batch_kinds.Detector):
    whole_batches = 0

    @property
    def loss_averages(self) -> Any:
        return "samples"  # otherwise, the check of the first loss counts samples, too

    def num_samples(self, batch: Any) -> int:
        samples = super().num_samples(batch)
        self.whole_batches += samples == batch_kinds.BATCH
        return samples


def test_more_microbatches_do_not_count_the_samples_of_a_batch_more_often():
    counts = []
    for grad_accum in (2, 4):
        model = CountingDetector()
        with make_trainer("detection", model=model, grad_accum=grad_accum) as trainer:
            trainer.fit()
        counts.append(model.whole_batches)
    assert counts[0] == counts[1]


def test_a_batch_whose_samples_cannot_be_counted_is_an_error_with_a_remedy():
    model = batch_kinds.UnsizedModel()
    message = r"batch of type Unsized.*to\(device\) and len\(\); otherwise override Model.num_s"
    with make_trainer("a count by the model", model=model) as trainer, pytest.raises(TypeError, match=message):
        trainer.fit()


def test_casting_a_batch_with_an_object_is_an_error():
    with pytest.raises(TypeError, match=r"a batch holds a GraphBatch: precision='bf16' and some algorithms"):
        Precision("bf16").cast((batch_kinds.join([1, 2]), torch.zeros(2)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_accepts_any_kind_of_batch(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(*KINDS[kind])
    build.check(Experiment(config))
    findings = dry_run.try_out(Experiment(config))
    assert findings.device == "cpu" and findings.batch
    if kind == "graphs":
        assert findings.batch == "GraphBatch of 4"


@pytest.mark.parametrize("load", ["load_endless", "load_rollouts"])
def test_a_dry_run_reads_endless_loaders_and_those_that_a_callback_prepares(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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


def test_a_run_on_an_endless_loader_is_resumed_bit_for_bit(tmp_path: Path):
    def run(duration: str, **arguments: Any) -> Any:
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
