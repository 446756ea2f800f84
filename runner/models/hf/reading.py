"""Keep transformers from reading tensor values in a forward pass: the host would wait, and meta tensors have none."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Rows(threading.local):
    are_single = False


_ROWS = _Rows()


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Within the `with` block, transformers treats each row of a batch as one sequence, without looking for several.

    It does nothing while torch compiles, because transformers then reads no values.
    """
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace thread-local values
        yield
        return
    previous = _ROWS.are_single
    _ROWS.are_single = True
    try:
        yield
    finally:
        _ROWS.are_single = previous


def skip_value_checks(network: nn.Module) -> None:
    """Make a transformers model skip two checks that read tensor values.

    One looks for several sequences in a row, and is skipped inside `one_sequence_per_row`; the other warns of padding.
    On the meta device, experts are also computed in a way that reads no values.
    """
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is not None and not hasattr(find, "is_wrapped"):

        @functools.wraps(find)
        def find_unless_single(*args: Any, **kwargs: Any) -> Any:
            is_single = not torch.compiler.is_dynamo_compiling() and _ROWS.are_single
            return None if is_single else find(*args, **kwargs)

        find_unless_single.is_wrapped = True  # pyright: ignore[reportAttributeAccessIssue]
        masking_utils.find_packed_sequence_indices = find_unless_single
    for module in network.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _do_nothing  # pyright: ignore[reportArgumentType]
    if hasattr(network, "set_experts_implementation") and any(parameter.is_meta for parameter in network.parameters()):
        network.set_experts_implementation("batched_mm")  # pyright: ignore[reportCallIssue]


def _do_nothing(*_: Any) -> None:
    """Do nothing."""
