from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_files import limited_files
from tiny_runs import tiny_trainer
from torch import nn
from torchmetrics import Metric

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import CheckpointSaver, InMemoryLogger, MLPerfCallback
from runner.callbacks.mlperf_callback import BENCHMARKS
from runner.data import TensorLoader
from runner.libraries.extras import how_to_install

installed = importlib.util.find_spec("mlperf_logging") is not None
pytestmark = pytest.mark.skipif(not installed, reason="needs the package mlperf-logging")

SUBMISSION = [f"submission_{name}" for name in ("benchmark", "division", "org", "platform", "status")]
BEGIN = ["cache_clear", "init_start", *SUBMISSION, "seed", "global_batch_size", "train_samples", "eval_samples"]
BEGIN += ["init_stop", "run_start"]
EPOCH = ["block_start", "epoch_start", "epoch_stop", "block_stop"]
REFUSAL = "the compliance checker refuses a result without an eval_accuracy below 1.0"
EVALUATION = ["eval_start", "eval_accuracy", "eval_stop"]


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    targets = (inputs.sum(dim=1) > 0).long()
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(inputs[:10], targets[:10], batch_size=5, shuffle=False),
        "max_duration": "2ep",
        "run_dir": run_dir,
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Check the format of a run's only result, and return its lines without their source locations."""
    (path,) = run_dir.glob("mlperf/results/*/*/result_*.txt")
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
    for line in lines:
        assert list(line) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert line["metadata"].pop("file") == "runner/callbacks/mlperf_callback.py"
        assert line["metadata"].pop("lineno") > 0
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    return lines


def keys(run_dir: Path) -> list[str]:
    return [line["key"] for line in read(run_dir)]


def values(run_dir: Path, key: str) -> list[Any]:
    return [line["value"] for line in read(run_dir) if line["key"] == key]


def check(path: Path, folder: Path) -> None:
    """Run MLPerf's compliance checker in a process, and assert that it accepts a result."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "4.0.0", "--werror", str(path)]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "SUCCESS" in finished.stderr


def is_accepted(path: Path) -> bool:
    """Return whether MLPerf's compliance checker accepts a result; it writes to the working directory."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", "4.0.0", False, True)
    valid, *_ = mlp_compliance.main(str(path), "training_4.0.0/common.yaml", checker)
    return valid


@pytest.mark.slow
def test_the_checkers_of_mlperf_accept_a_run_on_digits(run_app, tmp_path: Path):
    from mlperf_logging.system_desc_checker.system_desc_checker import check_system_desc

    settings = [f"callbacks.mlperf_callback.{setting}" for setting in ("target=0.5", "exit_at_target=true", "index=3")]
    run_app("model=mlp", "data.batch_size=30", "+callbacks=mlperf_callback", *settings, "trainer.max_duration=9ep")
    (run_dir,) = (folder.parent for folder in tmp_path.glob("outputs/*/*/mlperf"))
    (path,) = run_dir.glob("mlperf/results/*/resnet/result_3.txt")
    check(path, tmp_path)
    assert values(run_dir, "train_samples") == [1200] and values(run_dir, "eval_samples") == [597]
    assert values(run_dir, "global_batch_size") == [30]
    *before, last = values(run_dir, "eval_accuracy")
    assert before and max(before) < 0.5 <= last
    assert read(run_dir)[-1]["metadata"] == {"status": "success"}
    (system,) = run_dir.glob("mlperf/systems/*.json")
    valid, name, prefix, _ = check_system_desc(str(system), "training", "4.0.0")
    assert valid and name == system.stem == path.parent.parent.name
    assert prefix.startswith(f"unnamed,{name},")


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_checker_accepts_each_benchmark(benchmark: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, benchmark, target=2.0)) as trainer:
        trainer.fit()
    assert is_accepted(*tmp_path.glob(f"mlperf/results/*/{benchmark}/result_0.txt"))


def test_events_are_written_in_order(tmp_path: Path):
    memory = InMemoryLogger()
    callback = MLPerfCallback("mlperf", 0, target=2.0, submitter="us", system_name="it", status="cloud")
    with make_trainer(tmp_path, callback, loggers=[memory], seed=7) as trainer:
        trainer.fit()
        trainer.eval()
    lines = read(tmp_path)
    assert [line["key"] for line in lines] == [*BEGIN, *EPOCH, *EVALUATION, *EPOCH, *EVALUATION, "run_stop"]
    events = {line["key"]: line["value"] for line in lines}
    assert [events[key] for key in SUBMISSION] == ["resnet", "open", "us", "it", "cloud"]
    sizes = {"seed": 7, "global_batch_size": 4, "train_samples": 12, "eval_samples": 10, "cache_clear": False}
    assert events.items() >= sizes.items()
    assert values(tmp_path, "eval_accuracy") == memory.get_timeseries("metrics/eval/MulticlassAccuracy")[1][:2]
    for key in ("epoch_start", "epoch_stop", *EVALUATION):
        assert [line["metadata"]["epoch_num"] for line in lines if line["key"] == key] == [1, 2]
    for key in ("block_start", "block_stop"):
        blocks = [line["metadata"] for line in lines if line["key"] == key]
        assert blocks == [{"first_epoch_num": number, "epoch_count": 1} for number in (1, 2)]
    assert lines[-1]["metadata"] == {"status": "aborted"}
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    for line in lines:
        assert line["event_type"] == kinds.get(line["key"].rpartition("_")[2], "POINT_IN_TIME")
    system = json.loads((tmp_path / "mlperf" / "systems" / "it.json").read_text())
    assert (system["submitter"], system["status"], system["system_name"]) == ("us", "Available cloud", "it")
    assert system["framework"] == f"PyTorch {torch.__version__}"
    assert system["number_of_nodes"] == "1" and system["accelerators_per_node"] == "0"


def test_reaching_the_target_ends_the_result_and_optionally_training(tmp_path: Path):
    for name, exits in (("continues", False), ("exits", True)):
        callback = MLPerfCallback("mlperf", 0, target=0.0, exit_at_target=exits)
        with make_trainer(tmp_path / name, callback, eval_interval="2ba") as trainer:
            trainer.fit()
            assert trainer.state.timestamp.batch == (2 if exits else 6)
        inside = [*EPOCH[:2], *EVALUATION, *EPOCH[2:]]
        assert keys(tmp_path / name) == [*BEGIN, *inside, "run_stop"]
        lines = read(tmp_path / name)
        assert lines[-1]["metadata"] == {"status": "success"}
        starts = [line["metadata"]["epoch_num"] for line in lines if line["key"] == "eval_start"]
        assert starts == [pytest.approx(2 / 3)]


@pytest.mark.parametrize(("target", "status"), [(100.0, "success"), (0.0, "aborted")])
def test_a_loss_has_to_fall_below_the_target_and_gives_a_warning(target: float, status: str, tmp_path: Path, caplog):
    name = "loss" if target else "eval/loss"
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=target, metric_name=name)) as trainer:
        trainer.fit()
    assert read(tmp_path)[-1]["metadata"] == {"status": status}
    warning = f"mlperf_callback: lower values of metric_name={name!r} are better, so it is not an accuracy; {REFUSAL}"
    assert caplog.messages == [warning]


class ScriptedModel(ClassificationModel):
    """Reports these values as accuracies, one per evaluation."""

    def __init__(self, *values: float):
        super().__init__(nn.Linear(3, 2), 2)
        self.values = iter(values)

    def metrics(self, train):
        return {} if train else {"MulticlassAccuracy": ScriptedMetric(self.values)}


class ScriptedMetric(Metric):
    def __init__(self, values: Iterator[float]):
        super().__init__()
        self.values = values

    def update(self, outputs, targets):
        pass

    def compute(self):
        return torch.tensor(next(self.values))


@pytest.mark.parametrize("values", [(70, 80, 80), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (1.0, 0.5, 1.0)], ids=str)
def test_a_result_that_the_checker_would_refuse_gives_one_warning_per_session(
    values: tuple[float, ...], tmp_path: Path, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for begin, end in ((0, 1), (1, 3)):  # a resumed run remembers the accuracies of the first one
        arguments = {"model": ScriptedModel(*values[begin:]), "max_duration": f"{end}ep"}
        arguments |= {"resume_path": tmp_path / "checkpoint"} if begin else {}
        caplog.clear()
        with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=99.0), **arguments) as trainer:
            trainer.fit()
            save_checkpoint(trainer.state, tmp_path / "checkpoint")
        accepted = min(values[:end]) < 1.0
        warning = f"mlperf_callback: MulticlassAccuracy is {values[begin]:.4g}; {REFUSAL}"
        assert caplog.messages == ([] if accepted else [warning])
        assert is_accepted(*tmp_path.glob("mlperf/results/*/resnet/result_0.txt")) is accepted


def test_only_the_evaluator_of_metric_label_is_logged(tmp_path: Path):
    from runner import Evaluator

    data = TensorLoader(torch.randn(6, 3), torch.zeros(6).long(), batch_size=3, shuffle=False)
    evaluators = [Evaluator("eval", data), Evaluator("other", data)]
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=2.0), eval_dataloader=evaluators) as trainer:
        trainer.fit()
    assert keys(tmp_path) == [*BEGIN, *EPOCH, *EVALUATION, *EPOCH, *EVALUATION, "run_stop"]


class Fails(Callback):
    """Raises in the second batch of the second evaluation."""

    def eval_batch_end(self, state, logger):
        if state.timestamp.epoch == 2 and state.eval_timestamp.batch == 2:
            raise RuntimeError("on purpose")


def test_a_failed_run_is_logged_as_aborted_with_all_intervals_closed(tmp_path: Path):
    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=2.0), Fails()).fit()
    assert keys(tmp_path) == [*BEGIN, *EPOCH, *EVALUATION, *EPOCH, "eval_start", "eval_stop", "run_stop"]
    assert read(tmp_path)[-1]["metadata"] == {"status": "aborted"}


@pytest.mark.parametrize("cut", ["2ba", "3ba", "5ba"])
def test_a_resumed_run_continues_its_result(cut: str, tmp_path: Path):
    def fit(name: str, duration: str, **arguments: Any) -> None:
        callbacks = [MLPerfCallback("mlperf", 0, target=2.0, system_name="it"), CheckpointSaver("1ba")]
        with make_trainer(tmp_path / name, *callbacks, max_duration=duration, **arguments) as trainer:
            trainer.fit()

    fit("whole", "3ep")
    fit("cut", cut)
    assert keys(tmp_path / "cut")[-1] == "run_stop"
    checkpoint = tmp_path / "cut" / "checkpoints" / "latest"
    fit("cut", "3ep", resume_path=checkpoint)

    if cut == "3ba":  # at the end of an epoch; elsewhere, the first session ends with an additional evaluation
        whole, resumed = ([{**line, "time_ms": 0} for line in read(tmp_path / name)] for name in ("whole", "cut"))
        assert resumed == whole
    starts = [line["metadata"] for line in read(tmp_path / "cut") if line["key"] in ("epoch_start", "epoch_stop")]
    assert starts == [{"epoch_num": number} for number in (1, 1, 2, 2, 3, 3)]
    assert keys(tmp_path / "cut").count("run_start") == keys(tmp_path / "cut").count("run_stop") == 1


class SavesAtTheEnd(Callback):
    """Writes a checkpoint when a run closes, as after a failure."""

    def close(self, state, logger):
        save_checkpoint(state, state.run_dir / "late")


def test_a_checkpoint_saved_after_the_result_was_aborted_continues_it(tmp_path: Path):
    with make_trainer(
        tmp_path, MLPerfCallback("mlperf", 0, target=2.0), SavesAtTheEnd(), max_duration="1ep"
    ) as trainer:
        trainer.fit()
    assert keys(tmp_path)[-1] == "run_stop"
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=2.0), resume_path=tmp_path / "late") as trainer:
        trainer.fit()
    assert keys(tmp_path) == [*BEGIN, *EPOCH, *EVALUATION, *EPOCH, *EVALUATION, "run_stop"]


def test_a_second_fit_continues_the_result(tmp_path: Path):
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=2.0), max_duration="1ep") as trainer:
        trainer.fit()
        trainer.fit("1ep")
    assert keys(tmp_path) == [*BEGIN, *EPOCH, *EVALUATION, *EPOCH, *EVALUATION, "run_stop"]


def test_cache_clear_cmd_runs_before_training(tmp_path: Path):
    command = f'{sys.executable} -c \'open("{tmp_path}/cleared", "w")\''
    with make_trainer(tmp_path / "run", MLPerfCallback("mlperf", 0, cache_clear_cmd=command)) as trainer:
        assert (tmp_path / "cleared").exists()
        trainer.fit()
    assert values(tmp_path / "run", "cache_clear") == [True]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-command", "cannot be run"),
        (f"{sys.executable} -c 'raise SystemExit(\"no permission\")'", "failed with 1: no permission"),
        ("echo 'open", "cannot be run"),
    ],
)
def test_a_failing_cache_clear_cmd_is_an_error(command: str, reason: str, tmp_path: Path):
    with pytest.raises(ValueError) as caught:
        make_trainer(tmp_path, MLPerfCallback("mlperf", 0, cache_clear_cmd=command))
    assert str(caught.value).startswith(f"cache_clear_cmd={command!r}: ") and reason in str(caught.value)


def test_an_evaluation_without_training_writes_nothing(tmp_path: Path):
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0)) as trainer:
        trainer.eval()
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_gives_one_warning_and_training_continues(tmp_path: Path, caplog):
    with make_trainer(tmp_path, MLPerfCallback("mlperf", 0, target=2.0)) as trainer:
        with limited_files(4_000):  # enough until training starts
            trainer.fit()
        assert trainer.state.timestamp.batch == 6
    (message,) = caplog.messages
    assert message.startswith("mlperf_callback cannot write (")
    (path,) = tmp_path.glob("mlperf/results/*/*/result_0.txt")
    assert "run_start" in path.read_text()


def program() -> None:
    from pathlib import Path

    import torch

    from runner import ClassificationModel, Trainer
    from runner.callbacks import MLPerfCallback
    from runner.data import TensorLoader

    data = TensorLoader(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64), batch_size=4, shuffle=False)
    with Trainer(
        model=ClassificationModel(torch.nn.Linear(3, 2), 2),
        train_dataloader=data,
        eval_dataloader=data,
        optimizers=lambda params: torch.optim.SGD(params, lr=1.0),
        max_duration="9ep",
        callbacks=[MLPerfCallback("mlperf", 0, target=1.0, exit_at_target=True)],
        run_dir=Path("run"),
        device="cpu",
    ) as trainer:
        trainer.fit()
        print(trainer.state.timestamp.epoch)


def test_ranks_stop_together_and_write_one_result(run_ranks, tmp_path: Path):
    epochs = [int(rank.stdout) for rank in run_ranks(program)]
    assert epochs[0] == epochs[1] < 9
    assert values(tmp_path / "run", "global_batch_size") == [4]
    assert len(values(tmp_path / "run", "eval_accuracy")) == epochs[0]
    assert len([*(tmp_path / "run").rglob("*.txt")]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"root_folder": "/tmp/mlperf"},
        {"root_folder": "../mlperf"},
        {"root_folder": ""},
        {"index": -1},
        {"index": 1.5},
        {"benchmark": "digits"},
        {"target": "high"},
        {"target": float("nan")},
        {"division": "closed"},
        {"metric_label": "train"},
        {"submitter": ""},
        {"system_name": "a/b"},
        {"cache_clear_cmd": " "},
        {"status": "mine"},
        {"host_processors_per_node": 0},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError) as caught:
        MLPerfCallback(**({"root_folder": "mlperf", "index": 0} | arguments))
    assert str(caught.value).startswith(f"{name}={value!r}: ")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)  # as if it were not installed
    message = f"MLPerfCallback needs mlperf_logging, not installed here: {how_to_install('mlperf')}"
    with pytest.raises(ImportError, match=re.escape(message)):
        MLPerfCallback("mlperf", 0)
