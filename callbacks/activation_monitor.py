"""Logs statistics of the inputs and outputs of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from runner import Callback, Time, TimeUnit
from runner.callbacks._thinning import next_measurement
from runner.failures.checks import check_list
from runner.failures.errors import wrong_argument
from runner.timing.time import convert

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from runner import Logger, State


class ActivationMonitor(Callback):
    """Logs statistics of each module's inputs and outputs at an interval, to show activations that vanish or explode.

    Each statistic is taken over the last dimension (the features of a token, the width of an image) and averaged over
    the others, in 32 bits or more. It covers the first microbatch of rank 0's share of the batch, and the first call of
    a module that is called several times. Only floating-point tensors are measured. Modules have hooks only
    during the batches that are measured, and the values are read back in the background.

    Args:
        interval: time between two measurements, in batches, epochs or as a fraction of max_duration; an int is a
            number of epochs. The batch that completes the interval is measured. None means every 25 batches up to
            batch 1000, and every 100 after that.
        ignore_module_types: class names of modules to leave out, such as ['Dropout']; None measures all.

    Raises:
        ValueError: an argument is out of range, or, at FIT_START, no module has a class in `ignore_module_types`, the
            interval cannot be converted to batches, or a module is compiled, so that its hooks are not called.

    Logs:
        activations/l2_norm/{module}_{input,output}.{i}: Euclidean norm of tensor i, counted from 0; no unit.
        activations/average/{module}_{input,output}.{i}: mean of tensor i; no unit.
        activations/kurtosis/{module}_{input,output}.{i}: excess kurtosis of tensor i, 0 for a normal distribution; no
            unit. Constant rows have no kurtosis and are left out.
        activations/max/{module}_{input,output}.{i}: maximum of tensor i; no unit.
    """

    def __init__(
        self, interval: str | int | Time | None = None, ignore_module_types: Sequence[str] | None = None
    ) -> None:
        self.interval = None if interval is None else _parse(interval)
        check_list("ignore_module_types", ignore_module_types)
        self.ignore_module_types = ignore_module_types
        self._interval = (1, 1)  # in batches, as a fraction of whole numbers
        self._due = 0  # the next batch to measure, counted from 1
        self._modules: list[tuple[str, nn.Module]] = []
        self._hooks: list[RemovableHandle] = []
        self._measured: set[tuple[str, str]] = set()
        self._metrics: dict[str, Any] = {}
        self._last: Tensor | None = None
        self._version = 0  # of `_last`: torch counts its in-place changes
        self._statistics: dict[str, Tensor] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        named = [*state.unwrapped_model.named_modules()]
        ignored = list(self.ignore_module_types or ())
        refuse_compiled(dict(named))
        classes = {type(module).__name__ for _, module in named}
        for name in ignored:
            if name not in classes:
                raise ValueError(
                    f"ignore_module_types={ignored}: no module is a {name!r}; there are {', '.join(sorted(classes))}"
                )
        self._modules = [(name, module) for name, module in named if name and type(module).__name__ not in ignored]
        if self.interval is not None:
            self._interval = _in_batches(self.interval, state)
        self._due = self._next_due(state.timestamp.batch)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        if not logger.destinations:
            return
        if state.timestamp.batch + 1 >= self._due:
            self._due = self._next_due(self._due)
            for name, module in self._modules:
                # Inputs are measured before the call, because a module may change them in place.
                self._hooks.append(
                    module.register_forward_pre_hook(partial(self._measure_input, name), with_kwargs=True)
                )
                self._hooks.append(module.register_forward_hook(partial(self._measure_output, name)))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            logger.log_uncopied(self._metrics)
            self._hooks = []
            self._measured = set()
            self._metrics = {}
            self._last = None

    def _next_due(self, batch: int) -> int:
        if self.interval is None:
            return next_measurement(25, batch)
        batches, parts = self._interval
        intervals = batch * parts // batches + 1
        return -(-intervals * batches // parts)

    def _measure_input(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._measure(name, "input", (args, kwargs))

    def _measure_output(self, name: str, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._measure(name, "output", output)

    def _measure(self, name: str, kind: str, values: Any) -> None:
        from runner.device.batch import tensors

        if (name, kind) in self._measured:
            return
        self._measured.add((name, kind))
        for index, tensor in enumerate(tensors(values)):
            if tensor.is_floating_point() and tensor.ndim and tensor.numel():
                # The output of one module is usually the input of the next: it is measured once.
                if tensor is not self._last or tensor._version != self._version:
                    self._last = tensor
                    self._version = tensor._version
                    self._statistics = statistics(tensor)
                for statistic, value in self._statistics.items():
                    self._metrics[f"activations/{statistic}/{name}_{kind}.{index}"] = value


def refuse_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Check that no module is compiled, because torch calls no hooks of a compiled module or of modules inside it.

    Raises:
        ValueError: a module is compiled.
    """
    # Either by `module.compile()`, or by `torch.compile(module)`, which wraps it.
    compiled = [
        name
        for name, module in modules.items()
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    ]
    if compiled:
        listed = ", ".join(name or "the model" for name in compiled[:3])
        listed += f" and {len(compiled) - 3} more" * (len(compiled) > 3)
        remedy = "remove the monitor, or do not compile (compile=True, or the algorithm Compile)"
        raise ValueError(f"ActivationMonitor needs modules that are not compiled, unlike {listed}: {remedy}")


def _parse(interval: str | int | Time) -> Time:
    time = Time.parse_or_epochs(interval, "interval")
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION) or not time.value:
        raise wrong_argument("interval", str(time), "must be above 0 and in ba, ep or dur, such as '25ba'")
    return time


def _in_batches(interval: Time, state: State) -> tuple[int, int]:
    """Return an interval in batches as numerator and denominator."""
    try:
        batches = convert(interval, TimeUnit.BATCH, state.max_duration, state.train_dataloader_len)
    except ValueError:
        facts = f"max_duration='{state.max_duration}', {state.train_dataloader_len} batches an epoch"
        raise ValueError(
            f"interval='{interval}': cannot be converted to batches here ({facts}); give it in 'ba'"
        ) from None
    return batches.as_integer_ratio()


def statistics(activations: Tensor) -> dict[str, Tensor]:
    """Return statistics over the last dimension of a tensor `(..., D)`, averaged over the others, without a sync."""
    import torch

    values = activations.detach()
    values = values.float() if values.itemsize < 4 else values
    # Standardized rows: the squares of a row add up to D, or to 0 if the row is constant.
    tiny = torch.finfo(values.dtype).tiny
    standardized, means, _ = torch.native_layer_norm(values, values.shape[-1:], None, None, tiny)
    squares = standardized.square()
    second = squares.sum()
    fourth = squares.square().sum()
    return {
        "l2_norm": torch.linalg.vector_norm(values, dim=-1).mean(),
        "average": means.mean(),
        "kurtosis": torch.sub(fourth, second, alpha=3) / second,
        "max": values.amax(dim=-1).mean(),
    }
