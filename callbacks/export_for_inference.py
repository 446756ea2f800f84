"""Exports the trained model to a file that other programs can run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.failures.checks import check_one_of
from runner.failures.errors import wrong_argument
from runner.files.values import InnerPath
from runner.libraries.extras import require

if TYPE_CHECKING:
    from torch import nn

    from runner import Logger, State

log = logging.getLogger("runner")

SUFFIXES = {"torch_export": ".pt2", "onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}


class ExportForInference(Callback):
    """Exports the model at FIT_END, reads the file back and checks that it gives the same outputs as the model.

    Rank 0 exports a copy on the CPU, in evaluation mode, with averaged weights if an algorithm keeps an average. For a
    `LanguageModel`, and for a `SupervisedModel` or `ClassificationModel` with one input, it exports the inner module,
    which maps inputs to outputs. Any other model is exported as a whole and takes a batch; a transformers model takes
    it without labels. The file gets its final name only after it has passed the check, and is logged as an artifact in
    the folder 'export'. ONNX keeps the order of nested outputs, but not their names. If torch cannot export the model,
    the run ends with an error, so place this callback after `checkpoint_saver`. If the file cannot be
    written, or outputs are not finite, there is only a warning.

    Args:
        save_format: 'torch_export' (runs without the model's source code), 'onnx', 'torchscript' (deprecated by torch),
            or 'safetensors' (weights only).
        save_path: path of the file relative to the run's folder, with the suffix of the format (.pt2, .onnx, .pt or
            .safetensors); None means 'model' with that suffix.
        sample_input: an input for the module: a tensor, or a tuple, list or mapping of tensors, with samples along
            dimension 0. None means the last training batch or, if this process has not trained, the first batch of the
            data.
        transforms: functions, applied in order, that take a module and return the module to export instead.
        dynamic_batch: whether the file accepts any number of samples, not only that of the sample input.

    Raises:
        ValueError: an argument is out of range, or, at FIT_START, `save_path` cannot be written, the model does not
            accept `sample_input`, or the weights are bf16 and the format is ONNX.
        ImportError: a package that the format needs is missing.
        RuntimeError: at FIT_END, the outputs of the file differ from the model's, or the format cannot represent them.
    """

    def __init__(
        self,
        save_format: str = "torch_export",
        save_path: InnerPath | Path | None = None,
        sample_input: Any = None,
        transforms: Sequence[Callable[[nn.Module], nn.Module]] | None = None,
        dynamic_batch: bool = True,
    ) -> None:
        check_one_of("save_format", save_format, SUFFIXES)
        suffix = SUFFIXES[save_format]
        if save_path is not None and Path(save_path).suffix != suffix:
            raise wrong_argument(
                "save_path", str(save_path), f"must end in {suffix!r} with save_format={save_format!r}"
            )
        if save_format == "onnx":
            require("save_format='onnx'", "export", "onnx", "onnxscript", "onnxruntime")
        if transforms is not None and not all(map(callable, transforms)):
            raise wrong_argument("transforms", transforms, "must be functions from a module to a module")
        if sample_input is not None:
            from runner.callbacks._export import check_sample

            check_sample(sample_input)
        self.save_format = save_format
        self.save_path = Path(f"model{suffix}" if save_path is None else save_path)
        self.sample_input = sample_input
        self.transforms = tuple(transforms or ())
        self.dynamic_batch = dynamic_batch

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        export = self._module_and_inputs(state) if self.sample_input is not None else None
        if get_global_rank() != 0:
            return
        if self.save_format == "onnx" and state.precision.value == "bf16":
            raise ValueError("save_format='onnx': a CPU cannot run its bf16 weights; use 'torch_export'")
        path = state.run_dir / self.save_path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                reason = "it is a folder" if path.is_dir() else None
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise wrong_argument("save_path", str(self.save_path), f"cannot be written ({reason}); give another path")
        if export is not None:
            module, inputs = export
            try:
                module(inputs)
            except Exception as error:
                raise ValueError(f"sample_input: the model cannot take it ({error})") from error

    def fit_end(self, state: State, logger: Logger) -> None:
        from runner.callbacks._export import write

        export = self._module_and_inputs(state)
        if export is None:
            return
        module, inputs = export
        path = state.run_dir / self.save_path
        # Keep the suffix, because libraries derive the format from it.
        temporary = path.with_name(f".unchecked-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not write(self.save_format, module, inputs, temporary, self.dynamic_batch):
                log.warning("%s: the model's outputs are not finite", self.config_key)
            os.replace(temporary, path)
        except OSError as error:
            log.warning("training is done; the export failed: %s cannot be written (%s)", path, error.strerror or error)
        except Exception as error:
            error.add_note(f"while exporting the model with save_format={self.save_format!r}")
            raise
        else:
            logger.log_artifact(path, "export")
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _module_and_inputs(self, state: State) -> tuple[nn.Module, Any] | None:
        """Return the module and its inputs; None on ranks other than 0, which only help to gather a sharded model."""
        from runner import get_global_rank
        from runner.callbacks._export import module_and_inputs
        from runner.callbacks._inference import inference
        from runner.distributed.sharding import is_sharded

        if get_global_rank() != 0 and not is_sharded(state.unwrapped_model):
            return None
        with inference(state):
            module, inputs = module_and_inputs(state, self.sample_input)
        if get_global_rank() != 0:
            return None
        for transform in self.transforms:
            module = transform(module)
        return module, inputs
