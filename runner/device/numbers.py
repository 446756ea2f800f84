"""The numbers that a tensor stores, for norms, checks and clipping that need plain tensors of real numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers_of(tensor: Tensor) -> Tensor:
    """Return the real numbers that a tensor stores: real and imaginary parts, and only the stored values if sparse.

    Their 2-norm equals that of the tensor. A plain tensor is returned unchanged. Otherwise the result is a view if the
    tensor is coalesced and not lazily conjugated, see `make_plain`.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def make_plain(gradient: Tensor) -> Tensor:
    """Return a gradient that shares memory with its `numbers_of`, so that these can be changed in place."""
    return gradient.coalesce() if gradient.is_sparse else gradient.resolve_conj()
