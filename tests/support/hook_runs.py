"""A run with each callback and algorithm that ships, and what it leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import logged
from sessions import CONF
from stores import query

HOOKS = [
    (group, path.stem) for group in ("callbacks", "algorithms") for path in sorted((CONF / group).glob("[!_]*.yaml"))
]
# Compiling takes a minute, and what the compiler makes depends on the shapes that came before.
BY_NAME = [one for one in HOOKS if one[1] not in ("none", "compile")]
IMAGES = ("model=resnet8", "model.module.width=8", "data=synthetic_images", "data.size=8", "data.channels=1")
TEXT = ("model=gpt", "model.module.d_model=8", "model.module.dropout=0.1", "data=synthetic_tokens", "data.context=16")
SMALL = (
    *("data.num_samples=100", "data.batch_size=13", "data.eval_samples=32", "data.eval_batch_size=32"),
    *("trainer.max_duration=2ep", "trainer.eval_interval=4ba", "callbacks.checkpoint_saver.save_interval=3ba"),
)
"""Two epochs of seven full batches and one of nine samples."""
NORMALIZED = ("mean=0.5", "std=0.15")  # as if the images, whose deviation is 1.4, had been between 0 and 1
SETTINGS: dict[str, tuple[str, ...]] = {
    "activation_monitor": ("interval=2ba",),
    "alibi": ("max_sequence_length=16",),
    "augmix": NORMALIZED,
    "blurpool": ("min_channels=1",),
    "early_stopper": ("min_delta=1.0", "patience=7ba"),
    "ema": ("half_life=3ba",),
    "image_visualizer": ("interval=3ba",),
    "factorize": ("min_channels=8",),
    "generate": ("prompts=[a]", "max_new_tokens=4"),
    "low_precision_group_norm": ("allow_no_match=true",),
    "load_checkpoint": ("checkpoint=earlier",),
    "mlflow_logger": ("tracking_uri=sqlite:///mlflow.db", "log_system_metrics=false"),
    "optimizer_monitor": ("batch_log_interval=2",),
    "rand_augment": NORMALIZED,
    "state_digest": ("interval=1ba",),
    "squeeze_excite": ("min_channels=4", "latent_channels=2"),
    "stochastic_depth": ("target_block=BasicBlock", "drop_rate=0.5"),
    "swa": ("update_interval=2ba",),
    "system_metrics_monitor": ("interval=2ba",),
    "threshold_stopper": ("threshold=1.75",),
    "torch_profiler": ("skip_first=1", "active=2"),
    "trivial_augment": NORMALIZED,
}
"""Arguments that must be given, or with which there is something to see within two epochs."""
OF_LANGUAGE_MODELS = (
    *("alibi", "gated_linear_units", "generate", "gyro_dropout", "low_precision_layer_norm", "ngram_embedding"),
    *("qk_norm", "rotary_embedding", "seq_length_warmup", "value_embedding"),
)
PACKAGES = {"mlperf_callback": "mlperf_logging", "tensorboard_logger": "tensorboard", "wandb_logger": "wandb"}
FILES_OF_A_SESSION = ("event_trace", "tensorboard_logger", "torch_profiler", "wandb_logger")
"""Those that begin files of their own in each session."""
TIMED = re.compile(r"time/(train|val|total|remaining)|throughput/|memory/|system/")
"""Keys of metrics that no two runs have in common."""


def compared(run: Path, with_files: bool) -> list[dict[str, Any]]:
    """The values that a run logged, without its config and those that depend on the clock."""
    found = []
    for entry in logged(run):
        if "artifact" in entry:
            entry["artifact"] = str(Path(entry["artifact"]).relative_to(run))
        is_file = "artifact" in entry or "table" in entry
        if (is_file and with_files) or ("key" in entry and not TIMED.match(entry["key"])):
            found.append(entry)
    return found


def files(run: Path) -> dict[str, str | None]:
    """The names of files in a run's folder, of some with their text."""
    paths = [path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    return {str(path.relative_to(run)): path.read_text() if path.name == "digests.jsonl" else None for path in paths}


def assert_mlflow_equal(folder: Path) -> None:
    """Two runs in the store, finished, with the same points, each once."""
    store = folder / "mlflow.db"
    runs = query(store, "select run_uuid, status from runs")
    logged = "select key, step, value from metrics where run_uuid = ? order by key, step"
    points = [query(store, logged, run) for run, _ in runs]
    assert [status for _, status in runs] == ["FINISHED"] * 2
    kept, expected = ([point for point in one if not TIMED.match(point[0])] for one in points)
    assert kept == expected and len({point[:2] for point in kept}) == len(kept) > 50


def arguments_of(group: str, name: str) -> list[str]:
    """The overrides of a small run with one callback or algorithm; skips the test if that cannot be tried."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    if name in ("cuda_graph", "cudnn_benchmark", "float8") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    hooks = {"callbacks": ["checkpoint_saver", "json_lines_logger"], "algorithms": []}
    hooks[group] += [name] if name not in hooks[group] else []
    overrides = [*(TEXT if name in OF_LANGUAGE_MODELS else IMAGES), *SMALL]
    overrides += ["trainer.precision=amp_bf16"] if name.startswith("low_precision") else []
    overrides += [f"{key}=[{','.join(names)}]" for key, names in hooks.items()]
    return overrides + [f"{group}.{name}.{setting}" for setting in SETTINGS.get(name, ())]


def assert_equal_runs(name: str, killed: Path, whole: Path) -> None:
    """Two runs left the same, to the last bit."""
    left, expected = (torch.load(run / "outcome.pt", weights_only=True) for run in (killed, whole))
    torch.testing.assert_close(left, expected, rtol=0, atol=0)
    with_files = name not in FILES_OF_A_SESSION
    assert compared(killed, with_files) == compared(whole, with_files)
    if with_files:
        assert files(killed) == files(whole)
    if name == "mlflow_logger":
        assert_mlflow_equal(killed.parent)
