"""What MLflow shows of a run: its parameters, data sets and note, and the columns of the list of runs."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import main_runs
import pytest
import torch
from mlflow_runs import log_steps, logging_to, points, query

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow.description import describe_config, describe_dataset, typed_overrides
from runner.callbacks._mlflow.session import Session
from runner.callbacks._mlflow.spool import read_entries
from runner.data import DatasetLoader, TensorLoader
from runner.data.content import MOST_BYTES, digest
from runner.terminal.commands import show_typed


def test_parameters_omit_defaults_and_the_name_of_the_run() -> None:
    saver = {"_target_": "runner.callbacks.CheckpointSaver", "keep": 3, "save_interval": "1ep", "monitor": "eval/loss"}
    config = {
        "seed": 3,
        "run_name": "a name",
        "model": {"_target_": "runner.ClassificationModel", "num_classes": 10, "module": {"_target_": "mine.Net"}},
        "init_weights": "in_order",
        "data": {"_target_": "runner.data.load_digits", "seed": 3, "transform": None},
        "optimizer": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "param_groups": {}},
        "trainer": {"_target_": "runner.Trainer", "max_duration": "2ep", "precision": "fp32", "grad_accum": 4},
        "callbacks": {"checkpoint_saver": saver, "mlflow_logger": {"_target_": "x.Y", "tags": {"a": "b"}}},
        "algorithms": {"mixup": {"_target_": "runner.algorithms.MixUp", "alpha": 0.2, "input_key": 0}, "ema": {}},
    }
    assert describe_config(config) == {
        "seed": "3",
        "model.num_classes": "10",
        "model.module._target_": "mine.Net",
        "optimizer.lr": "0.1",
        "trainer.max_duration": "2ep",
        "trainer.grad_accum": "4",
        "callbacks.checkpoint_saver.monitor": "eval/loss",
        "algorithms": "mixup, ema",
        "algorithms.mixup.alpha": "0.2",
    }


def test_parameters_changed_or_added_on_resume_become_tags(folder: Path) -> None:
    for lr, more in ((0.1, {}), (0.2, {"grad_accum": 4})):
        config = {"optimizer": {"lr": lr}, "trainer": {"_target_": "runner.Trainer", **more}}
        with logging_to(MLflowLogger(), "r", config=config) as (_, logger):
            logger.log_hyperparameters({"extra": 1})
    assert dict(query("select key, value from params")) == {"optimizer.lr": "0.1", "extra": "1"}
    changes = query("select key, value from tags where key like 'param_changed%' order by key")
    assert changes == [("param_changed.optimizer.lr", "0.2"), ("param_changed.trainer.grad_accum", "4")]


def test_a_data_set_is_identified_by_its_content() -> None:
    generator = torch.Generator().manual_seed(0)
    samples, labels = torch.randn(8, 3, generator=generator), torch.arange(8)

    def describe(first: torch.Tensor, **arguments: Any) -> dict[str, Any]:
        loader = TensorLoader(first, labels, **({"batch_size": 4, "shuffle": True} | arguments))
        return describe_dataset(loader, "train", {"_target_": "runner.data.load_digits"})

    description = describe(samples)
    assert (description["name"], description["profile"]) == ("digits", {"num_rows": 8})
    assert json.loads(description["schema"]["mlflow_tensorspec"]["features"])[0]["tensor-spec"]["shape"] == [-1, 3]
    assert describe(samples, batch_size=2, shuffle=False) == description
    changed = samples.clone()
    changed[7, 2] += 1
    assert describe(changed)["digest"] != description["digest"]
    lazy = DatasetLoader(range(8), batch_size=4, shuffle=False)
    assert describe_dataset(lazy, "train", None)["profile"] == {"num_rows": 8}


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3.0), torch.zeros(0, 3), torch.zeros(3, 2, dtype=torch.bfloat16).T, torch.ones(3, dtype=torch.bool)],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_every_tensor_has_a_digest(tensor: torch.Tensor) -> None:
    assert len(digest([tensor])) == 16 and digest([tensor]) == digest([tensor.clone()]) != digest([tensor, tensor])


def test_the_digest_of_a_large_tensor_covers_its_last_row() -> None:
    windows = torch.arange(2 * MOST_BYTES, dtype=torch.int32).unfold(0, 1025, 1024)  # overlapping in memory
    other = windows.clone()
    other[-1] += 1
    assert digest([windows]) == digest([windows.clone()]) != digest([other])


def test_a_command_is_shown_as_typed_without_the_paths_of_programs() -> None:
    assert show_typed(["/a/bin/python3", "-m", "runner", "+callbacks=[a,b]"]) == "python3 -m runner '+callbacks=[a,b]'"
    assert show_typed(["/a/bin/python3", "/a/bin/runner", "model=mlp"]) == "runner model=mlp"
    assert show_typed([]) == "python"


def test_typed_overrides_exclude_deleted_keys_and_those_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["python", "-m", "runner", "-m", "seed=0,1", "~callbacks.x", "+vars.a=b=c", "hydra.run.dir=x"]
    monkeypatch.setattr(sys, "orig_argv", [*typed, "model=mlp", "--json"])
    assert typed_overrides() == {"seed": "0,1", "vars.a": "b=c", "model": "mlp"}


def test_no_entry_is_lost_if_another_thread_appends_while_the_run_begins(folder: Path) -> None:
    for attempt in range(5):
        fields = {"tracking_uri": f"sqlite:///{folder}/outputs/mlflow.db", "experiment_name": "e", "run_name": "r"}
        session = Session(folder / str(attempt), **fields, by_key=False, system_metrics_interval=None)
        ready = threading.Barrier(2)

        def append(session: Session = session, ready: threading.Barrier = ready) -> None:
            ready.wait()
            for number in range(200):
                session.append({"m": {"number": float(number)}, "s": number, "t": 0})

        thread = threading.Thread(target=append)
        thread.start()
        ready.wait()
        session.begin()
        thread.join()
        entries = [entry for entry, _ in read_entries(folder / str(attempt) / "mlflow" / "spool.jsonl") if entry]
        assert [entry["s"] for entry in entries if "m" in entry] == [*range(200)]
        session.finish("KILLED")


def test_a_sweep_and_its_jobs_have_names_parameters_notes_and_columns(run_app: Any, tmp_path: Path) -> None:
    typed = {"trainer.grad_accum": "1", "callbacks.checkpoint_saver.keep": "3"}  # equal to the defaults
    swept = ("-m", "seed=0,1", "optimizer.lr=0.05", "trainer.max_duration=10ba")
    run_app(*main_runs.SHORT, *swept, *(f"{key}={typed[key]}" for key in typed))
    params = dict(main_runs.query(tmp_path, "select key, value from params order by length(value) desc"))
    assert params | {"model": "mlp", "data": "digits", "optimizer": "sgd"} | typed == params
    assert not {"launch", "trainer", "init_weights", "algorithms.label_smoothing.target_key"} & {*params}
    runs = main_runs.query(tmp_path, "select name, run_uuid, end_time - start_time from runs order by start_time")
    summary, (_, job, _), _ = runs
    assert summary[0] == "sweep-seed-mlp-digits" and summary[2] > 100  # ms; it started before its jobs
    tags = dict(main_runs.query(tmp_path, "select key, value from tags where run_uuid = ?", job))
    assert Path(tags["runner.checkpoints"]).is_dir()
    note = tags["mlflow.note.content"]
    assert f"[Learning curves](#/experiments/1/runs/{job}/artifacts/plots/learning_curves.png)" in note
    assert "[All runs and their results](#/experiments/1/runs?viewStateShareKey=runner)" in note
    assert "![" not in note and "```" not in note  # MLflow shows pictures too wide, and does not wrap code
    assert "train 1,200 samples" in tags["mlflow.note.content"] and "Data: digits" in tags["mlflow.note.content"]
    inputs = main_runs.query(tmp_path, "select distinct name, length(digest) from datasets")
    assert inputs == [("digits", 16)]
    ((view,),) = main_runs.query(
        tmp_path, "select value from experiment_tags where key = 'mlflow.sharedViewState.runner'"
    )
    columns = json.loads(json.loads(view)["state"])["selectedColumns"]
    assert {"metrics.`metrics/eval/MulticlassAccuracy`", "metrics.`loss/eval/total`", "params.`model`"} <= {*columns}


def test_best_values_continue_after_a_resume(folder: Path) -> None:
    key = "loss/eval/total"
    first = MLflowLogger()
    with logging_to(first, "r") as (state, logger):
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            logger.log_metrics({key: loss, "metrics/eval/Accuracy/0": loss}, step=step)
        log_steps(state, logger, range(1, 2))
        logger.flush()
        saved = first.state_dict()
    with logging_to(MLflowLogger(), "r", saved) as (state, logger):
        for step, loss in ((4, 1.5), (5, 0.5)):
            logger.log_metrics({key: loss}, step=step)
    assert points("best/eval/loss") == [(1, 3.0), (2, 1.0), (5, 0.5)]
    assert not points("best/eval/Accuracy/0")
