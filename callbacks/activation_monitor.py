"""What goes into each module and comes out of it, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from runner import Callback, Time, TimeUnit
from runner.callbacks._thinning import next_look
from runner.time import convert

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from runner import Logger, State


class ActivationMonitor(Callback):
    """Logs statistics of the inputs and outputs of each module at an interval, to see activations vanish or explode.

    Each is taken over the last dimension (the features of a token, the width of an image) and averaged over the others,
    in 32 bits. They are of rank 0's share of the batch, of its first microbatch, and of the first call where a module
    is called several times. Tensors that hold no floating-point numbers are passed over. The modules have hooks only
    in the batches that are looked at, and the values are read back in the background.

    Args:
        interval: from one time to the next, in batches, epochs or as a fraction of max_duration; an int is epochs. The
            batch that completes it is looked at. None: 25 batches up to batch 1000, and 100 from then on.
        ignore_module_types: names of classes whose modules are left out, such as ['Dropout']; None: none.

    Raises:
        ValueError: an argument is out of range; at FIT_START, no module is of a class to leave out, the interval is no
            known number of batches, or some of the modules are compiled, so that they cannot be looked into.

    Logs:
        activations/l2_norm/{module}_{input,output}.{i}: Euclidean norm of tensor i, counted from 0.
        activations/average/{module}_{input,output}.{i}: mean.
        activations/kurtosis/{module}_{input,output}.{i}: excess kurtosis, 0 for a normal distribution; constant rows
            have none and are left out.
        activations/max/{module}_{input,output}.{i}: maximum.
    """

    def __init__(
        self, interval: str | int | Time | None = None, ignore_module_types: Sequence[str] | None = None
    ) -> None:
        self.interval = None if interval is None else _parse(interval)
        if isinstance(ignore_module_types, str):
            raise ValueError(
                f"ignore_module_types={ignore_module_types!r}: must be a list of names, ['{ignore_module_types}']"
            )
        self.ignore_module_types = ignore_module_types
        self._interval = (1, 1)  # in batches, as a fraction of whole numbers
        self._due = 0  # the next batch that is looked at, from 1
        self._modules: list[tuple[str, nn.Module]] = []
        self._hooks: list[RemovableHandle] = []
        self._seen: set[tuple[str, str]] = set()
        self._metrics: dict[str, Any] = {}
        self._last: Tensor | None = None
        self._version = 0  # of its memory, counted by changes in place
        self._statistics: dict[str, Tensor] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        named, ignored = [*state.unwrapped_model.named_modules()], list(self.ignore_module_types or ())
        refuse_compiled(dict(named))
        classes = {type(module).__name__ for _, module in named}
        for name in ignored:
            if name not in classes:
                raise ValueError(
                    f"ignore_module_types={ignored}: no module is a {name!r}; there are {', '.join(sorted(classes))}"
                )
        self._modules = [(name, one) for name, one in named if name and type(one).__name__ not in ignored]
        if self.interval is not None:
            self._interval = _in_batches(self.interval, state)
        self._due = self._due_after(state.timestamp.batch)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch + 1 < self._due or not logger.destinations:
            return
        self._due = self._due_after(self._due)
        for name, module in self._modules:
            # Inputs before the call: a module may change them in place.
            self._hooks.append(module.register_forward_pre_hook(partial(self._see_input, name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._see_output, name)))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            logger.hand_over(self._metrics)
            self._hooks, self._seen, self._metrics, self._last = [], set(), {}, None

    def _due_after(self, batch: int) -> int:
        if self.interval is None:
            return next_look(25, batch)
        batches, parts = self._interval
        intervals = batch * parts // batches + 1
        return -(-intervals * batches // parts)

    def _see_input(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._see(name, "input", (args, kwargs))

    def _see_output(self, name: str, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._see(name, "output", output)

    def _see(self, name: str, kind: str, values: Any) -> None:
        from runner.batch import tensors

        if (name, kind) in self._seen:
            return
        self._seen.add((name, kind))
        for index, tensor in enumerate(tensors(values)):
            if tensor.is_floating_point() and tensor.ndim and tensor.numel():
                # What comes out of one module is as a rule what goes into the next: it is looked at once.
                if tensor is not self._last or tensor._version != self._version:
                    self._last, self._version, self._statistics = tensor, tensor._version, statistics(tensor)
                for statistic, value in self._statistics.items():
                    self._metrics[f"activations/{statistic}/{name}_{kind}.{index}"] = value


def refuse_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Raise where torch compiled a module: neither its hooks nor those of the modules in it are called.

    Args:
        modules: all of a model's, by name.

    Raises:
        ValueError: some are; they are named.
    """
    # By `module.compile()`, or by `torch.compile(module)`, which wraps it.
    found = [
        name for name, one in modules.items() if one._compiled_call_impl is not None or "_orig_mod" in one._modules
    ]
    if found:
        listed = ", ".join(name or "the model" for name in found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)
        remedy = "leave out the monitor, or what compiles (compile=True, or the algorithm Compile)"
        raise ValueError(f"ActivationMonitor cannot look into what is compiled, which is {listed}: {remedy}")


def _parse(interval: str | int | Time) -> Time:
    time = Time.parse_or_epochs(interval, "interval")
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION) or not time.value:
        raise ValueError(f"interval={str(time)!r}: must be above 0 and in ba, ep or dur, such as '25ba'")
    return time


def _in_batches(interval: Time, state: State) -> tuple[int, int]:
    """Return an interval in batches as a quotient of whole numbers."""
    try:
        batches = convert(interval, TimeUnit.BATCH, state.max_duration, state.train_dataloader_len)
    except ValueError:
        given = f"max_duration='{state.max_duration}', {state.train_dataloader_len} batches an epoch"
        raise ValueError(
            f"interval='{interval}': is no known number of batches here ({given}); give it in 'ba'"
        ) from None
    return batches.as_integer_ratio()


def statistics(activations: Tensor) -> dict[str, Tensor]:
    """Return statistics over the last dimension of a tensor `(..., D)`, averaged over the others; without a sync."""
    import torch

    values = activations.detach()
    values = values.float() if values.itemsize < 4 else values
    # Rows less their means, divided by their deviations: the squares of a row add up to D, of a constant one to 0.
    tiny = torch.finfo(values.dtype).tiny
    standardized, means, _ = torch.native_layer_norm(values, values.shape[-1:], None, None, tiny)
    squares = standardized.square()
    second, fourth = squares.sum(), squares.square().sum()
    return {
        "l2_norm": torch.linalg.vector_norm(values, dim=-1).mean(),
        "average": means.mean(),
        "kurtosis": torch.sub(fourth, second, alpha=3) / second,
        "max": values.amax(dim=-1).mean(),
    }
