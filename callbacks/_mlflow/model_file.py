"""Writes the trained model to a file, from which the writer process makes an MLflow model."""

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
from runner.callbacks._mlflow.image_model_file import example_of, preparation_of, write_image_model
from runner.callbacks._mlflow.spool import EXAMPLE, FILES, MODEL
from runner.callbacks._mlflow.text_model_file import has_texts, write_text_model
from runner.checkpoints.snapshot import weights_of
from runner.data.content import digest
from runner.distributed.sharding import is_sharded
from runner.failures.errors import wrong_argument
from runner.models.model import in_eval_mode

log = logging.getLogger("runner")

SMALL = 10_000  # numbers in a sample up to which the example has two samples, to show that batch sizes vary


def check_loggable(state: State, log_model: str) -> None:
    """Check that the model can be logged with the requested weights."""
    if is_sharded(state.unwrapped_model):
        reason = "rank 0 does the logging, and has only part of the weights; use +callbacks=export_for_inference"
        raise wrong_argument("log_model", log_model, f"not possible with a sharded model: {reason}")
    if log_model != "best":
        return
    savers = [callback for callback in state.callbacks if hasattr(callback, "best_checkpoint")]
    if not any(getattr(saver, "monitor", None) for saver in savers):
        raise ValueError(
            "log_model='best': the best checkpoint needs a metric; add "
            "callbacks.checkpoint_saver.monitor=eval/loss or another metric, or give log_model=last"
        )


def write_model(state: State, run_dir: Path, log_model: str) -> dict[str, Any] | None:
    """Write the model as an exported program, and return its spool entry; if that fails, warn and return None.

    The program runs without the network's code, and nothing in it has to be unpickled. For an image classifier, the
    code that prepares its images is written too. A transformers model that maps texts to classes or to texts is saved
    in the transformers format instead.
    """
    folder = run_dir / "mlflow" / FILES / uuid.uuid4().hex
    try:
        with _weights(state, log_model):
            step = state.timestamp.batch
            entry = {"model": folder.name, "weights": log_model, "s": step, "torch": torch.__version__}
            if has_texts(state):
                folder.mkdir(parents=True)
                return entry | write_text_model(state, folder)
            preparation = preparation_of(state)
            module, inputs = module_and_inputs(state, preparation and example_of(state, preparation))
        folder.mkdir(parents=True)
        if preparation is not None:
            return entry | write_image_model(state, preparation, module, inputs, folder)
        write("torch_export", module, inputs, folder / MODEL, dynamic_batch=True)
        entry["digest"] = digest([*module.state_dict().values()])
        with torch.no_grad():
            outputs = module(inputs)
        if _converts_to_numpy(inputs) and _converts_to_numpy(outputs):
            np.save(folder / EXAMPLE, inputs[: 2 if inputs[:1].numel() <= SMALL else 1].numpy())
            entry |= {"inputs": tensor_spec(inputs), "outputs": tensor_spec(outputs)}
        return entry
    except Exception as error:  # torch.export raises errors of many kinds, and training is already done
        reason = next(iter(str(error).strip().splitlines()), "")
        log.warning("MLflow: the model is not logged: %s: %s", type(error).__name__, reason)
        shutil.rmtree(folder, ignore_errors=True)
        return None


@contextmanager
def _weights(state: State, log_model: str) -> Iterator[None]:
    """Put the model into evaluation mode with the weights to log, and restore it afterwards.

    Raises:
        FileNotFoundError: there is no best checkpoint, because the metric was never finite.
    """
    if log_model == "last":
        with inference(state):
            yield
        return
    checkpoints = (getattr(callback, "best_checkpoint", None) for callback in state.callbacks)
    best = next(filter(None, checkpoints), None)
    if best is None:
        raise FileNotFoundError("there is no best checkpoint, because the metric was never finite")
    with in_eval_mode(state.unwrapped_model), weights_of(state, best):
        yield


def _converts_to_numpy(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype != torch.bfloat16 and value.ndim > 0
