"""Exports modules to files for inference and loads them back, with a pair of functions for each format."""

from __future__ import annotations

import copy
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner import State
from runner.device.batch import count_samples, map_tensors, tensors
from runner.distributed.sharding import copy_whole, is_sharded
from runner.failures.errors import wrong_argument

Run = Callable[[Any], Any]


def check_sample(sample_input: Any) -> None:
    """Check that a value is a batch of samples."""
    try:
        works = count_samples(map_tensors(sample_input, lambda tensor: tensor)) > 0
    except TypeError:
        works = False
    if not works:
        allowed = "a tensor, or a tuple, list or mapping of tensors, with at least one sample along dimension 0"
        raise wrong_argument("sample_input", sample_input, f"must be {allowed}")


def last_or_first_batch(state: State) -> Any:
    """Return the last training batch; if this process has not trained, the first batch of a dataloader.

    Raises:
        RuntimeError: none of the dataloaders yields a batch.
    """
    if hasattr(state, "batch"):
        return state.batch
    loaders: list[Any] = [state.train_dataloader, *(evaluator.dataloader for evaluator in state.evaluators)]
    for loader in loaders:
        for batch in loader.first(1) if hasattr(loader, "first") else loader:
            return state.precision.cast(batch)
    raise RuntimeError("no batch to export with: nothing was trained, and the dataloaders are empty; set sample_input")


def module_and_inputs(state: State, sample_input: Any = None) -> tuple[nn.Module, Any]:
    """Return a copy of the module to export, with its current weights, and a sample input, both on the CPU.

    If the model is sharded, call this on all ranks; the module is then empty on all ranks but 0. Without a
    `sample_input`, the input comes from `last_or_first_batch`.
    """
    from runner import LanguageModel, SupervisedModel

    model: Any = state.unwrapped_model
    key = 0 if isinstance(model, LanguageModel) else model.inputs if isinstance(model, SupervisedModel) else None
    has_one_input = isinstance(key, int | str)
    if sample_input is None:
        batch = last_or_first_batch(state)
        without_targets = getattr(model, "without_targets", lambda whole: whole)
        sample_input = batch[key] if has_one_input else without_targets(batch)
    if is_sharded(model):
        copied: Any = copy_whole(model)
        module = nn.Module() if copied is None else copied.module if has_one_input else copied
    else:
        module = copy.deepcopy(model.module if has_one_input else model)
    module = module.cpu().requires_grad_(False)
    return module, map_tensors(sample_input, lambda tensor: tensor.detach().cpu())


def write(save_format: str, module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> bool:
    """Write a file, check that its outputs match the module's, and return whether the outputs are finite.

    With `dynamic_batch`, the file accepts any number of samples.

    Raises:
        OSError: the disk is full.
        RuntimeError: the outputs of the file differ from the module's, or the format cannot represent them.
    """
    samples = [inputs]
    if dynamic_batch:
        # Export with two samples, because torch treats a size of 1 as a constant; check with one sample as well.
        two = map_tensors(inputs, lambda batch: torch.cat([batch[:2], batch[:2]])[:2] if batch.ndim else batch)
        samples = [two, map_tensors(two, lambda batch: batch[:1] if batch.ndim else batch)]
    save, load = _FORMATS[save_format]
    with torch.no_grad():
        save(module, samples[0], path, dynamic_batch)
        run = load(path, module)
        are_finite = [_check_outputs(run(sample), module(sample)) for sample in samples]
    return all(are_finite)


def save_torch_export(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save a module with torch.export; `torch.export.load(path).module()` runs it without its source code."""
    content = io.BytesIO()  # torch's own writer would crash the process if the disk is full
    torch.export.save(_program(module, inputs, dynamic_batch), content)
    path.write_bytes(content.getbuffer())


def load_torch_export(path: Path, module: nn.Module) -> Run:
    """Return a callable that runs the file."""
    return torch.export.load(path).module()


def save_onnx(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save a module as ONNX in one file, of at most 2 GB."""
    program = _program(module, inputs, dynamic_batch)
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about deprecated functions that torch itself uses
        log.setLevel(logging.ERROR)  # torch warns of every torchvision operator that it does not know
        try:
            torch.onnx.export(program, f=path, external_data=False, verbose=False)
        finally:
            log.setLevel(level)


def load_onnx(path: Path, module: nn.Module) -> Run:
    """Return a function that runs the file in onnxruntime on the CPU, and names its outputs like the module's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]

    def run(inputs: Any) -> Any:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors(inputs), strict=True)}
        outputs = [torch.from_numpy(array) for array in session.run(None, arrays)]
        return dict(zip(by_name(module(inputs)), outputs, strict=True))

    return run


def save_torchscript(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save a trace of a module, which C++ can also run. It has only the branches that `inputs` take."""
    with warnings.catch_warnings():  # tracing is deprecated, and warns of untraced values: `write` checks the outputs
        warnings.simplefilter("ignore")
        try:
            traced: Any = torch.jit.trace(module, (inputs,), strict=False)  # allows a dict of tensors as output
        except RuntimeError as error:
            if not re.search("infer type|understood by the tracer|output from traced", str(error)):
                raise
            raise RuntimeError(
                "save_format='torchscript' supports only tensors, tuples of tensors, and dicts whose values are all "
                "tensors; this model has other inputs or outputs: use 'torch_export'"
            ) from None
    path.write_bytes(traced.save_to_buffer())  # torch's own writer would crash the process if the disk is full


def load_torchscript(path: Path, module: nn.Module) -> Run:
    """Return a callable that runs the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(str(path))


def save_safetensors(module: nn.Module, inputs: Any, path: Path, dynamic_batch: bool) -> None:
    """Save only the weights. Shared weights are saved once."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    try:
        save_model(module, str(path))
    except SafetensorError as error:
        number = re.search(r"(?:os error|code:) (\d+)", str(error))  # 'code:' in safetensors before 0.6
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def load_safetensors(path: Path, module: nn.Module) -> Run:
    """Return a copy of the module with the weights from the file."""
    from safetensors.torch import load_model

    loaded = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in loaded.state_dict().values():  # so that all values come from the file
            tensor.zero_()
    load_model(loaded, path)
    return loaded


def by_name(outputs: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors in a module's outputs, in order, named by their keys and positions, such as 'boxes.0'."""
    if isinstance(outputs, Tensor):
        return {name or "output": outputs}
    if outputs is None or isinstance(outputs, str | bytes | bool | int | float):
        return {}
    if not isinstance(outputs, Mapping | tuple | list):
        kind = type(outputs).__name__
        raise TypeError(f"the model returns a {kind}: it must return tensors, or a tuple, list or mapping of tensors")
    entries = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    named = [by_name(value, f"{name}.{key}" if name else str(key)) for key, value in entries]
    return {key: tensor for part in named for key, tensor in part.items()}


def _check_outputs(outputs: Any, expected: Any) -> bool:
    """Check that the outputs of a file match the module's, and return whether all of these are finite.

    Raises:
        RuntimeError: the outputs differ.
    """
    values = by_name(expected)
    try:
        torch.testing.assert_close(by_name(outputs), values, rtol=1e-3, atol=1e-4, equal_nan=True, check_stride=False)
    except AssertionError as error:
        raise RuntimeError(f"the file's outputs differ from the model's: {error}") from None
    return all(bool(tensor.isfinite().all()) for tensor in values.values())


def _program(module: nn.Module, inputs: Any, dynamic_batch: bool) -> torch.export.ExportedProgram:
    shapes = torch.export.ShapesCollection()
    for tensor in tensors(inputs) if dynamic_batch else ():
        shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    dynamic = shapes.dynamic_shapes(module, (inputs,)) if dynamic_batch else None
    return torch.export.export(module, (inputs,), dynamic_shapes=dynamic)


_FORMATS = {
    "torch_export": (save_torch_export, load_torch_export),
    "onnx": (save_onnx, load_onnx),
    "torchscript": (save_torchscript, load_torchscript),
    "safetensors": (save_safetensors, load_safetensors),
}
