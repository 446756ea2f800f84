"""Modules as files for inference, and back: one function of each kind for each format."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.batch import map_tensors, tensors

Run = Callable[[Any], Any]


def save_torch_export(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save what torch.export makes of a module; `torch.export.load(path).module()` runs it, without its source."""
    torch.export.save(_program(module, inputs, dynamic_batch), path)


def load_torch_export(path: Path, module: nn.Module) -> Run:
    """Return what runs the file."""
    return torch.export.load(path).module()


def save_onnx(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save a module as ONNX in one file, of at most 2 GB."""
    program = _program(module, inputs, dynamic_batch)
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch itself uses
        log.setLevel(logging.ERROR)  # it says of each operator of torchvision that it knows none
        try:
            torch.onnx.export(program, f=path, external_data=False, verbose=False)
        finally:
            log.setLevel(level)


def load_onnx(path: Path, module: nn.Module) -> Run:
    """Return what runs the file in onnxruntime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(inputs: Any) -> Any:
        given = {name: one.numpy() for name, one in zip(names, tensors(inputs), strict=True)}
        found = [torch.from_numpy(one) for one in session.run(None, given)]
        return found[0] if len(found) == 1 else tuple(found)

    return run


def save_torchscript(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save a trace of a module, which `torch.jit.load` runs also from C++; branches are those of these inputs."""
    with warnings.catch_warnings():  # torch says that it is deprecated, and what it does not follow: it is checked
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(module, (inputs,)), str(path))


def load_torchscript(path: Path, module: nn.Module) -> Run:
    """Return what runs the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(str(path))


def save_safetensors(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save the weights alone; shared ones once."""
    from safetensors.torch import save_model

    save_model(module, str(path))


def load_safetensors(path: Path, module: nn.Module) -> Run:
    """Return the module with the weights of the file."""
    from safetensors.torch import load_model

    other = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    load_model(other, path)
    return other


def _program(module: nn.Module, inputs: Any, dynamic_batch: bool) -> torch.export.ExportedProgram:
    shapes = map_tensors(inputs, lambda _: {0: torch.export.Dim.DYNAMIC}) if dynamic_batch else None
    return torch.export.export(module, (inputs,), dynamic_shapes=None if shapes is None else (shapes,))
