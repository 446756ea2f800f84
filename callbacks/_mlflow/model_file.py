"""Writes the trained model to a file, which the writer process logs to MLflow as a model."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner import State
from runner.callbacks._export import module_and_inputs, write
from runner.callbacks._inference import inference
from runner.callbacks._mlflow.description import tensor_spec
from runner.callbacks._mlflow.spool import EXAMPLE, FILES, MODEL
from runner.checkpoints.snapshot import weights_of
from runner.data.content import digest
from runner.distributed.sharding import is_sharded
from runner.failures.errors import wrong_argument
from runner.models.model import in_eval_mode

log = logging.getLogger("runner")

SMALL = 10_000  # numbers per sample up to which the input example has two samples, to show that it may


def check_loggable(state: State, log_model: str) -> None:
    """Check that the model can be logged, with the weights that are asked for."""
    if is_sharded(state.unwrapped_model):
        reason = "rank 0, which logs, has only a part of the weights; use +callbacks=export_for_inference"
        raise wrong_argument("log_model", log_model, f"not with a sharded model: {reason}")
    if log_model != "best":
        return
    savers = [one for one in state.callbacks if hasattr(one, "best_checkpoint")]
    if not any(getattr(one, "monitor", None) for one in savers):
        raise ValueError(
            "log_model='best': the best checkpoint needs a metric; add "
            "callbacks.checkpoint_saver.monitor=eval/loss or another metric, or give log_model=last"
        )


def write_model(state: State, run_dir: Path, log_model: str) -> dict[str, Any] | None:
    """Write the model as an exported program, and return the spool's entry; a failure gives a warning and None.

    The program runs without the code of the network, and holds nothing that a loader would have to unpickle.
    """
    folder = run_dir / "mlflow" / FILES / uuid.uuid4().hex
    try:
        with _weights(state, log_model):
            step = state.timestamp.batch
            module, inputs = module_and_inputs(state)
        folder.mkdir(parents=True)
        write("torch_export", module, inputs, folder / MODEL, dynamic_batch=True)
        entry = {
            "model": folder.name,
            "weights": log_model,
            "s": step,
            "digest": digest([*module.state_dict().values()]),
            "torch": torch.__version__,
        }
        with torch.no_grad():
            outputs = module(inputs)
        if _has_numpy(inputs) and _has_numpy(outputs):
            np.save(folder / EXAMPLE, inputs[: 2 if inputs[:1].numel() <= SMALL else 1].numpy())
            entry |= {"inputs": tensor_spec(inputs), "outputs": tensor_spec(outputs)}
        return entry
    except Exception as error:  # torch.export has many; training is done, and its results count
        reason = next(iter(str(error).strip().splitlines()), "")
        log.warning("MLflow: the model is not logged: %s: %s", type(error).__name__, reason)
        shutil.rmtree(folder, ignore_errors=True)
        return None


@contextmanager
def _weights(state: State, log_model: str) -> Iterator[None]:
    """Put the model into evaluation mode with the weights to log, and restore it afterwards.

    Raises:
        FileNotFoundError: no checkpoint is the best, because its metric was never finite.
    """
    if log_model == "last":
        with inference(state):
            yield
        return
    best = next((one for saver in state.callbacks if (one := getattr(saver, "best_checkpoint", None))), None)
    if best is None:
        raise FileNotFoundError("there is no best checkpoint, because the metric was never finite")
    with in_eval_mode(state.unwrapped_model), weights_of(state, best):
        yield


def _has_numpy(one: Any) -> bool:
    return isinstance(one, Tensor) and one.dtype != torch.bfloat16 and one.ndim > 0
