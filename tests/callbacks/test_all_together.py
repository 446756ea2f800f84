"""All callbacks in one run from the command line: their logs, files and messages, also after a kill and a resume."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import stores

from runner.callbacks import __all__ as SHIPPED
from runner.core.ordering import snake_case

DEFAULTS = {"mlflow_logger", "checkpoint_saver", "learning_curves", "progress_bar", "console_summary"}
NEED_OTHER_RUNS = {"load_checkpoint", "sweep_pruner"}
OTHERS = sorted({snake_case(name) for name in SHIPPED} - DEFAULTS - NEED_OTHER_RUNS)
ARGUMENTS = (f"+callbacks=[{','.join(OTHERS)}]", "callbacks.early_stopper.patience=100ep")
PACKAGES = ("mlperf_logging", "onnx", "tensorboard", "wandb")

# Keys that the trainer logs, and the keys in the table of callbacks. A name in braces stands for several names.
TRAINER = """loss/train/total metrics/train/{name} loss/eval/total metrics/eval/{name}
    time/epoch time/batch time/sample time/eval/sample """
TABLE = """throughput/batches_per_sec throughput/samples_per_sec throughput/flops_per_sec
    throughput/device/batches_per_sec throughput/device/samples_per_sec throughput/device/flops_per_sec
    time/train time/val time/total time/remaining_estimate lr-SGD/group0
    l2_norm/grad/{parameter} l2_norm/grad/global l2_norm/moment/{parameter} l2_norm/param/{parameter}
    l2_norm/update/{parameter} memory/rss memory/peak_rss
    activations/l2_norm/{tensor} activations/average/{tensor} activations/kurtosis/{tensor} activations/max/{tensor} """
GAUGES = ("throughput/", "memory/", "time/train", "time/val", "time/total", "time/remaining_estimate")
LANGUAGE = """time/token throughput/tokens_per_sec throughput/device/tokens_per_sec"""


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return stores.query(folder / "outputs" / "mlflow.db", sql)


def run_folder(folder: Path) -> Path:
    (run,) = (folder / "outputs").glob("20*/*")
    return run


def logged(folder: Path) -> Counter[tuple[str, int]]:
    """Count the values in MLflow by key and step, without system metrics."""
    rows = query(folder, "select key, step from metrics where key not like 'system/%'")
    return Counter((key, step) for key, step in rows)


def fill(table: str, names: dict[str, set[str]]) -> set[str]:
    """Return the keys of a table, with each name in braces replaced by the names of that kind."""
    keys = set()
    for key in table.split():
        filled = {key.replace(f"{{{kind}}}", name) for kind in names if f"{{{kind}}}" in key for name in names[kind]}
        keys |= filled or {key}
    return keys


def check_keys(folder: Path, table: str, names: dict[str, set[str]], retrained: range = range(0)) -> None:
    """Assert that MLflow has exactly the keys of the table, with one value per step, and that the files agree with it.

    MLflow keeps the first values of retrained batches. The files may lack gauges there: they are logged at intervals of
    time, so after a resume perhaps not for the same batches.
    """
    from tensorboard.backend.event_processing import event_accumulator

    counts = logged(folder)
    expected = fill(table, names)
    evaluated = {key.replace("loss/eval/total", "metrics/eval/loss") for key in expected if "/eval/" in key}
    best = {key.replace("metrics/", "best/") for key in evaluated if key.startswith("metrics/")}
    assert {key for key, _ in counts} == expected | best
    twice = {point for point, count in counts.items() if count > 1}
    assert {key for key, _ in twice} <= {"time/remaining_estimate", "time/train", "time/val", "time/total"}
    assert {step for _, step in twice} <= {max(step for _, step in counts)}  # logged again at the end
    lines = [json.loads(line) for line in (run_folder(folder) / "metrics.jsonl").read_text().splitlines()]
    in_lines = {(key, line["step"]) for line in lines for key in line.get("metrics", {})}
    events = event_accumulator.EventAccumulator(str(run_folder(folder) / "tensorboard"), {"scalars": 0}).Reload()
    in_events = {(key, event.step) for key in events.Tags()["scalars"] for event in events.Scalars(key)}
    retrained_gauges = {point for point in counts if point[1] in retrained and point[0].startswith(GAUGES)}
    for in_file in (in_lines, in_events):
        points = {point for point in in_file if not point[0].startswith("system/")}
        assert points <= {*counts}
        assert {point for point in counts if not point[0].startswith("best/")} <= points | retrained_gauges


def check_stderr(stderr: str, *idle: str) -> None:
    """Assert that the callbacks with nothing to do say so once, and that the others print nothing."""
    lines = [line for line in stderr.splitlines() if not line.startswith(("saving to MLflow", '{"schema"'))]
    assert sorted(re.sub("^(WARNING|INFO): ", "", line).split()[0].rstrip(":") for line in lines) == sorted(idle)


@pytest.fixture(autouse=True)
def packages() -> None:
    for package in PACKAGES:
        pytest.importorskip(package)


OWN = """
import os, signal
from pathlib import Path
from runner import Callback


class Killed(Callback):
    def before_backward(self, state, logger):
        if state.timestamp.batch == 40 and not Path("killed").exists():
            Path("killed").touch()
            os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.slow
def test_all_callbacks_log_each_step_once_although_the_run_is_killed(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    arguments = [*ARGUMENTS, "model=mlp", "data.batch_size=100", "trainer.max_duration=5ep"]  # 12 batches an epoch
    run_app(*arguments, "+callbacks.killed._target_=own.Killed", exit_code=-signal.SIGKILL)
    assert (run_folder(tmp_path) / "checkpoints" / "latest").resolve().name == "ep3-ba36"
    done = run_app("resume", str(run_folder(tmp_path)))
    check_stderr(done.stderr, "ReplicaMonitor", "generate", "memory_snapshot", "oom_observer", "text_examples")
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    layers = {f"module.layers.{index}" for index in (0, 2, 4)}
    parameters = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    modules = {"module", "module.layers", *(f"module.layers.{index}" for index in range(5))}
    tensors = {f"{module}_{kind}.0" for module in modules for kind in ("input", "output")}
    names = {"name": {"MulticlassAccuracy"}, "parameter": parameters, "tensor": tensors}
    check_keys(tmp_path, TRAINER + TABLE, names, retrained=range(37, 41))
    counts = logged(tmp_path)
    assert [step for key, step in sorted(counts) if key == "lr-SGD/group0"] == [*range(1, 61)]
    assert [step for key, step in sorted(counts) if key == "l2_norm/grad/global"] == [*range(10, 61, 10)]
    assert [step for key, step in sorted(counts) if key == "loss/eval/total"] == [*range(12, 61, 12)]
    in_folder = {path.name for path in run_folder(tmp_path).iterdir()}
    assert {"mlperf", "wandb", "model.pt2", "learning_curves.png", "event_trace", "torch_profiler"} <= in_folder


@pytest.mark.slow
def test_all_callbacks_log_a_language_model_on_two_ranks(tmp_path: Path, run_app: Any):
    metric = "callbacks.mlperf_callback.metric_name=BitsPerByte"
    tiny = ("model.module.d_model=16", "model.module.n_layers=1", "model.module.context=32", "data.context=32")
    tiny += ("data.eval_bytes=2048", "callbacks.generate.max_new_tokens=5")
    tiny += ("trainer.max_duration=30ba", "trainer.eval_interval=15ba")
    ranks = ("launch.nproc_per_node=2", "launch.threads=1")
    done = run_app(*ARGUMENTS, metric, "experiment=stdlib_lm_plain", *tiny, *ranks)
    idle = ("image_visualizer", "memory_snapshot", "mlperf_callback", "oom_observer", "text_examples")
    check_stderr(done.stderr, *idle)
    keys = {key for key, _ in logged(tmp_path)}
    names = {
        "name": {"BitsPerByte"},
        "parameter": {match[1] for key in keys if (match := re.fullmatch(r"l2_norm/grad/(module\..*)", key))},
        "tensor": {match[1] for key in keys if (match := re.fullmatch(r"activations/max/(.*put\.\d+)", key))},
    }
    assert len(names["parameter"]) > 10 and {"module.blocks.0_input.0", "module_output.0"} <= names["tensor"]
    table = (TRAINER + TABLE + LANGUAGE).replace("SGD", "AdamW").replace(" metrics/train/{name}", "")
    check_keys(tmp_path, table, names)
    assert len(done.stdout.splitlines()) < 40
    assert done.stdout.count("\n    1 ") >= 1  # lines of the first epoch
    for folder in ("event_trace", "torch_profiler"):
        files = sorted((run_folder(tmp_path) / folder).glob("*.json"))
        assert [file.name[:5] for file in files] == ["rank0", "rank1"]
