"""The numbers that a tensor holds, for norms, checks and clipping that work on plain tensors of real numbers only."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers_of(tensor: Tensor) -> Tensor:
    """Return the real numbers that a tensor stores: real and imaginary parts, and of a sparse one only what it holds.

    The 2-norm is that of the tensor. A plain tensor is returned itself. A view shares memory with the tensor if that is
    coalesced and not lazily conjugated: see `make_plain`.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def make_plain(gradient: Tensor) -> Tensor:
    """Return a gradient whose `numbers_of` share its memory, so that they can be changed in place."""
    return gradient.coalesce() if gradient.is_sparse else gradient.resolve_conj()
