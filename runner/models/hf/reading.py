"""Keep transformers from reading values in a forward pass: the host would wait, and meta tensors have none."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Rows(threading.local):
    hold_one = False


_ROWS = _Rows()


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Inside the context, transformers takes each row of a batch for one sequence, without looking for several.

    It does nothing while torch compiles, as transformers reads no values then.
    """
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace thread-local values
        yield
        return
    before = _ROWS.hold_one
    _ROWS.hold_one = True
    try:
        yield
    finally:
        _ROWS.hold_one = before


def without_reading(network: nn.Module) -> None:
    """Make a model of transformers skip two checks that read values, as `one_sequence_a_row` has the answers.

    One check is whether positions start again within a row, the other warns of padding. On the meta device, experts
    are computed in a way that reads no values either.
    """
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is not None and not hasattr(find, "asks_first"):

        @functools.wraps(find)
        def find_where_unknown(*args: Any, **kwargs: Any) -> Any:
            known = not torch.compiler.is_dynamo_compiling() and _ROWS.hold_one
            return None if known else find(*args, **kwargs)

        find_where_unknown.asks_first = True  # pyright: ignore[reportAttributeAccessIssue]
        masking_utils.find_packed_sequence_indices = find_where_unknown
    for module in network.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _warn_of_nothing  # pyright: ignore[reportArgumentType]
    if hasattr(network, "set_experts_implementation") and any(one.is_meta for one in network.parameters()):
        network.set_experts_implementation("batched_mm")  # pyright: ignore[reportCallIssue]


def _warn_of_nothing(*_: Any) -> None:
    """Do nothing."""
