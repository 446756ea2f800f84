"""The trained model as a file that other programs can run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks._extra import require
from runner import Callback

if TYPE_CHECKING:
    from torch import nn

    from runner import Logger, State

SUFFIXES = {"torch_export": ".pt2", "onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}


class ExportForInference(Callback):
    """Exports the model at FIT_END, reads the file back and checks that it gives the model's outputs.

    Rank 0 exports a copy on the CPU, in evaluation mode, with an average of the weights where an algorithm keeps one.
    Of a `ClassificationModel` or `LanguageModel` it is the module, which maps inputs to logits; any other model is
    exported itself, and takes a batch. The file appears under its name once it has passed, and is logged as an artifact
    in the folder 'export'. What torch cannot export ends the run with an error; put this after `checkpoint_saver`.

    Args:
        save_format: 'torch_export' (runs without the model's source), 'onnx', 'torchscript' (deprecated by torch), or
            'safetensors' (the weights alone).
        save_path: of the file, relative to the run's folder, with the format's suffix (.pt2, .onnx, .pt or
            .safetensors); None: 'model' with that suffix.
        sample_input: what the module is called with, its dimension 0 being samples; None: the last training batch.
        transforms: functions from a module to the module to export in its place, applied in order.
        dynamic_batch: whether the file takes any number of samples, and not just as many as the sample has.

    Raises:
        ValueError: an argument is out of range.
        ImportError: a package that the format needs is missing.
        RuntimeError: at FIT_END, the outputs of the file differ from the model's.
    """

    def __init__(
        self,
        save_format: str = "torch_export",
        save_path: str | Path | None = None,
        sample_input: Any = None,
        transforms: Sequence[Callable[[nn.Module], nn.Module]] | None = None,
        dynamic_batch: bool = True,
    ) -> None:
        if save_format not in SUFFIXES:
            raise ValueError(f"save_format={save_format!r}: must be one of {', '.join(map(repr, SUFFIXES))}")
        suffix = SUFFIXES[save_format]
        if save_path is not None and Path(save_path).suffix != suffix:
            raise ValueError(f"save_path={str(save_path)!r}: must end in {suffix!r} with save_format={save_format!r}")
        if save_format == "onnx":
            require("save_format='onnx'", "export", "onnx", "onnxscript", "onnxruntime")
        if transforms is not None and not all(callable(one) for one in transforms):
            raise ValueError(f"transforms={transforms!r}: must be functions from a module to a module")
        self.save_format = save_format
        self.save_path = Path(f"model{suffix}" if save_path is None else save_path)
        self.sample_input = sample_input
        self.transforms = tuple(transforms or ())
        self.dynamic_batch = dynamic_batch

    def fit_end(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        if get_global_rank() != 0:
            return
        path = state.run_dir / self.save_path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Keeps the suffix, by which libraries know the format.
        temporary = path.with_name(f".unchecked-{path.name}")
        try:
            self._export(state, temporary)
            os.replace(temporary, path)
        except Exception as error:
            error.add_note(f"while exporting the model with save_format={self.save_format!r}")
            raise
        finally:
            temporary.unlink(missing_ok=True)
        logger.log_artifact(path, "export")

    def _export(self, state: State, path: Path) -> None:
        import torch

        from callbacks import _export
        from callbacks._inference import inference
        from runner.batch import map_tensors

        with inference(state):
            module, inputs = _module_and_inputs(state)
            module = copy.deepcopy(module).cpu().requires_grad_(False)
        for transform in self.transforms:
            module = transform(module)
        inputs = map_tensors(inputs if self.sample_input is None else self.sample_input, lambda one: one.detach().cpu())
        samples = [inputs]
        if self.dynamic_batch:
            # Two samples, for torch takes a size of one for a constant; and one, to see that it did not.
            two = map_tensors(inputs, lambda one: torch.cat([one[:2], one[:2]])[:2])
            samples = [two, map_tensors(two, lambda one: one[:1])]
        save, load = (getattr(_export, f"{verb}_{self.save_format}") for verb in ("save", "load"))
        with torch.no_grad():
            save(module, samples[0], path, self.dynamic_batch)
            run = load(path, module)
            for sample in samples:
                try:
                    torch.testing.assert_close(run(sample), module(sample), rtol=1e-3, atol=1e-4, check_stride=False)
                except AssertionError as error:
                    raise RuntimeError(f"the file's outputs are not the model's: {error}") from None


def _module_and_inputs(state: State) -> tuple[nn.Module, Any]:
    """Return what is exported, and what it was called with last."""
    from runner import ClassificationModel, LanguageModel

    model = state.unwrapped_model
    if isinstance(model, ClassificationModel | LanguageModel):
        return model.module, state.batch[0]
    return model, state.batch
