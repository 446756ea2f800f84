"""`eval RUN` computes the metrics that training logged, and `predict RUN` writes a row for each sample."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import stores
import torch
from kept_runs import tree
from python_process import PATIENCE, run_python, start_python
from tiers import fast

from runner import ClassificationModel, LanguageModel, Model, Trainer
from runner.data import DatasetLoader, TensorLoader, load_digits
from runner.failures.errors import WrongConfig
from runner.records.predictions import write_predictions

# There are 597 samples to evaluate: the last of three batches has one sample, so a second rank has none.
TRAIN = (
    *("model=mlp", "data.batch_size=400", "data.eval_batch_size=298", "trainer.max_duration=2ep"),
    *("+algorithms=ema", "algorithms.ema.half_life=2ba", "callbacks=[mlflow_logger,checkpoint_saver]"),
)
KEYS = ("metrics/eval/MulticlassAccuracy", "loss/eval/total")
PRINTED = ("eval/MulticlassAccuracy", "eval/loss")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the run `run`, which tests do not change; they add other runs."""
    folder = tmp_path_factory.mktemp("trained")
    run_python(["-m", "runner", *TRAIN, "hydra.run.dir=run", "run_name=mine"], cwd=folder, check=True)
    return folder


def rows(folder: Path, sql: str, *values: Any) -> list[Any]:
    return stores.query(folder / "outputs" / "mlflow.db", sql, *values)


def logged(folder: Path, run: str, step: int) -> dict[str, float]:
    """Return the metrics in MLflow of a run's evaluation at a step."""
    sql = "select key, value from metrics join runs using (run_uuid) where name = ? and step = ? and key in (?, ?)"
    return dict(rows(folder, sql, run, step, *KEYS))


@pytest.mark.parametrize(("checkpoint", "step"), [("", 6), ("/checkpoints/ep1-ba3", 3)])
def test_eval_has_the_metrics_that_training_logged(trained: Path, run_app: Any, checkpoint: str, step: int):
    before = tree(trained / "run")
    name = f"again{step}"
    finished = run_app("eval", f"run{checkpoint}", f"run_name={name}", folder=trained)
    expected = logged(trained, "mine", step)
    assert len(expected) == 2
    assert logged(trained, f"eval-{name}", step) == expected
    for key, printed in zip(KEYS, PRINTED, strict=True):
        assert f" {printed} {expected[key]:.6g}" in " ".join(finished.stdout.split())
    assert tree(trained / "run") == before
    assert rows(trained, "select status from runs where name = ?", f"eval-{name}") == [("FINISHED",)]
    weights = str(next((trained / "run" / "checkpoints").glob(f"*-ba{step}")))
    assert (weights,) in rows(trained, "select value from tags where key = 'runner.evaluates'")
    # A slow machine reports the progress of MLflow; there are no other lines.
    assert all(line.startswith("sending to MLflow: ") for line in finished.stderr.splitlines())


def on_two_ranks(folder: Path, *arguments: str) -> str:
    """Run a command on two ranks, and return its standard output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    return run_python([*torchrun, *arguments, "callbacks=none"], cwd=folder, check=True).stdout


@pytest.mark.slow
def test_two_ranks_have_the_metrics_and_predictions_of_one_process(trained: Path, run_app: Any):
    output = on_two_ranks(trained, "eval", "run")
    metrics = dict(line.split() for line in output.splitlines() if line.startswith(PRINTED))
    expected = logged(trained, "mine", 6)
    assert [float(metrics[key]) for key in PRINTED] == [pytest.approx(expected[key], rel=1e-5) for key in KEYS]

    on_two_ranks(trained, "predict", "run", "hydra.run.dir=two")
    finished = run_app("predict", "run", "hydra.run.dir=one", folder=trained)
    assert "597 samples in the order of the data set: one/predictions.parquet" in finished.stdout
    assert "mlflow ui" not in finished.stdout
    table, ranks_table = (
        pyarrow.parquet.read_table(trained / folder / "predictions.parquet") for folder in ("one", "two")
    )
    assert table.schema == ranks_table.schema
    assert table.column_names == ["index", "target", "prediction", "probabilities"]
    for column in ("index", "target", "prediction"):
        assert table[column].to_pylist() == ranks_table[column].to_pylist()
    probabilities = [torch.tensor(part["probabilities"].to_pylist()) for part in (table, ranks_table)]
    torch.testing.assert_close(*probabilities, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probabilities[0].sum(dim=1), torch.ones(597))
    assert table["index"].to_pylist() == list(range(597))
    _, loader = load_digits(batch_size=9, eval_batch_size=9, seed=0)
    assert table["target"].to_pylist() == loader.tensors[1].tolist()
    correct = sum(a == b for a, b in zip(table["target"].to_pylist(), table["prediction"].to_pylist(), strict=True))
    assert correct / 597 == pytest.approx(expected[KEYS[0]])
    assert pyarrow.parquet.ParquetFile(trained / "one" / "predictions.parquet").num_row_groups == 3
    names = {path.name for path in (trained / "one").iterdir()}
    assert not any(name.endswith(".partial") for name in names)
    assert list((trained / "outputs" / "mlartifacts").rglob("predictions/predictions.parquet"))


def test_split_test_predicts_the_test_data(trained: Path, run_app: Any):
    command = ("predict", "run", "--split=test", "callbacks=none")
    finished = run_app(*command, "hydra.run.dir=none", exit_code=2, folder=trained)
    assert finished.stderr == "error: --split='test': this run has no such data; give train or eval\n"
    assert not (trained / "none").exists()
    run_app(*command, "data.test_samples=97", "hydra.run.dir=tested", folder=trained)
    targets = pyarrow.parquet.read_table(trained / "tested" / "predictions.parquet")["target"].to_pylist()
    *_, loader = load_digits(test_samples=97)
    assert targets == loader.tensors[1].tolist()


def test_training_data_is_predicted_in_the_order_of_the_data_set(trained: Path, run_app: Any):
    run_app("predict", "run", "--split", "train", "--format=pt", "callbacks=none", folder=trained)
    (path,) = trained.rglob("predictions.pt")
    predictions = torch.load(path, weights_only=True)
    loader, _ = load_digits(batch_size=9, eval_batch_size=9, seed=0)
    assert predictions["target"].equal(loader.tensors[1])
    assert predictions["index"].equal(torch.arange(1200))
    assert predictions["probabilities"].shape == (1200, 10)


@pytest.mark.parametrize(
    ("arguments", "part"),
    fast(
        [
            (["eval"], "eval: needs saved weights; write runner eval RUN, with a run's folder"),
            (["predict"], "predict: needs saved weights; write runner predict RUN, with a run's folder"),
            (["eval", "missing"], "RUN='missing': no such folder"),
            (["eval", "run", "run"], "eval: takes [RUN], not run run"),
            (["predict", "run", "--split=evall"], "--split='evall': did you mean 'eval'"),
            (["eval", "run", "model.module.hidden=[3]"], "do not fit the model"),
            (["eval", "run", "objective=nothing"], "objective='nothing'"),
        ],
        *("eval", "predict run --split=evall"),
    ),
)
def test_what_cannot_be_evaluated_is_refused_in_one_message(
    trained: Path, run_app: Any, arguments: list[str], part: str
):
    before = tree(trained)
    errors = run_app(*arguments, "callbacks=none", exit_code=2, folder=trained).stderr
    assert part in errors and errors.count("error: ") == 1 and len(errors.splitlines()) <= 6
    assert {*tree(trained)} == {*before}


def predict(model: Model, loader: Any, path: Path) -> tuple[int, str]:
    """Write the predictions of a model to a file, and return the number of rows and a description of their order."""
    with Trainer(model=model, eval_dataloader=loader, device="cpu") as trainer:
        return write_predictions(trainer, loader, path)


class OwnOutputs(Model):
    """A model whose outputs are those of a function of the batch."""

    def __init__(self, columns: Any) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, batch: Any) -> Any:
        return self.columns(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return batch.sum()


def test_predictions_include_samples_that_training_shuffles_or_drops(tmp_path: Path):
    data = torch.arange(7.0)
    model = OwnOutputs(
        lambda batch: {"twice": (2 * batch).bfloat16(), "grid": batch.reshape(-1, 1, 1).expand(-1, 2, 3)}
    )
    for loader in (
        TensorLoader(data, batch_size=3, shuffle=True, drop_last=True),
        DatasetLoader(data, batch_size=3, shuffle=True, drop_last=True),
    ):
        assert predict(model, loader, tmp_path / "p.parquet") == (7, "the order of the data set")
        table = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pydict()
        assert table["index"] == list(range(7))
        assert table["twice"] == [2.0 * value for value in range(7)]
        assert table["grid"] == [[[float(value)] * 3] * 2 for value in range(7)]
        predict(model, loader, tmp_path / "p.pt")
        predictions = torch.load(tmp_path / "p.pt", weights_only=True)
        assert predictions["twice"].dtype == torch.bfloat16 and predictions["grid"].shape == (7, 2, 3)


def test_predictions_may_differ_in_length_from_batch_to_batch(tmp_path: Path):
    model = OwnOutputs(lambda batch: batch[:, None].expand(-1, len(batch)))
    loader = TensorLoader(torch.arange(5.0), batch_size=3, shuffle=False)
    predict(model, loader, tmp_path / "p.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pydict()
    assert table["output"] == [[0.0] * 3, [1.0] * 3, [2.0] * 3, [3.0] * 2, [4.0] * 2]
    message = r"--format='pt': samples of output have different shapes, \(3,\) and \(2,\); give .*parquet"
    with pytest.raises(WrongConfig, match=message):
        predict(model, loader, tmp_path / "p.pt")
    assert not [*tmp_path.glob("*.pt*")]


def test_a_torch_dataloader_is_predicted_in_its_own_order(tmp_path: Path):
    loader = torch.utils.data.DataLoader(torch.arange(5.0), batch_size=2, sampler=[4, 2, 0, 1, 3])  # type: ignore[arg-type]
    rows, order = predict(OwnOutputs(lambda batch: batch), loader, tmp_path / "p.pt")
    assert (rows, order) == (5, "the order in which the loader yielded them")
    predictions = torch.load(tmp_path / "p.pt", weights_only=True)
    assert predictions["output"].tolist() == [4.0, 2.0, 0.0, 1.0, 3.0] and predictions["index"].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("columns", [lambda batch: batch.sum(), lambda batch: batch[:1], lambda batch: [batch, batch]])
def test_predictions_without_a_row_per_sample_are_refused(columns: Any, tmp_path: Path):
    loader = TensorLoader(torch.arange(4.0), batch_size=2, shuffle=False)
    with pytest.raises(ValueError, match=r"predictions\['output'\].*override Model.predictions"):
        predict(OwnOutputs(columns), loader, tmp_path / "p.parquet")
    assert list(tmp_path.iterdir()) == []


def test_prediction_columns_of_classification_and_language_models():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    batch = (torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    predictions = ClassificationModel(torch.nn.Linear(1, 2), num_classes=2).predictions(batch, logits)
    assert [*predictions] == ["target", "prediction", "probabilities"]
    assert predictions["prediction"].tolist() == [0, 1, 0]
    torch.testing.assert_close(predictions["probabilities"][:, 1], torch.sigmoid(logits[:, 1] - logits[:, 0]))

    logits, targets = torch.randn(2, 4, 5), torch.tensor([[1, 2, 3, -100], [0, 0, 4, 4]])
    predictions = LanguageModel(torch.nn.Identity()).predictions((targets, targets), logits)
    assert predictions["prediction"].equal(logits.argmax(dim=2))
    expected = torch.nn.functional.cross_entropy(logits.reshape(8, 5), targets.reshape(8), reduction="none")
    torch.testing.assert_close(predictions["loss"], expected.reshape(2, 4))
    assert predictions["loss"][0, 3] == 0


SLOW = """
import time
from pathlib import Path
from runner import Callback


class Slow(Callback):
    def eval_batch_end(self, state, logger):
        Path("started").touch()
        time.sleep(1.0)

    predict_batch_end = eval_batch_end
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "number", "processes"),
    [
        ("eval", signal.SIGTERM, 1),
        ("predict", signal.SIGTERM, 2),
        ("eval", signal.SIGINT, 1),
        ("eval", signal.SIGHUP, 1),
    ],
)
def test_a_signal_ends_an_evaluation_with_the_status_killed(
    trained: Path, tmp_path: Path, verb: str, number: signal.Signals, processes: int
):
    (tmp_path / "own.py").write_text(SLOW)
    command = ["-m", "runner", verb, str(trained / "run"), "hydra.run.dir=out"]
    command += ["+callbacks.slow._target_=own.Slow", "data.eval_batch_size=4", f"launch.nproc_per_node={processes}"]
    command += [
        f"callbacks.mlflow_logger.tracking_uri=sqlite:///{trained}/outputs/mlflow.db",
        f"run_name={tmp_path.name}",
    ]
    with start_python(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            name = f"{verb}-{tmp_path.name}"

            def wait_for_status(status: str) -> None:
                deadline = time.monotonic() + PATIENCE
                while rows(trained, "select status from runs where name = ?", name) != [(status,)]:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)

            wait_for_status("RUNNING")
            while not (tmp_path / "started").exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(PATIENCE) == 128 + number
            wait_for_status("KILLED")  # MLflow's writer outlives the process for a moment
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "KILLED"
