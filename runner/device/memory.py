"""The memory of accelerators."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes are free on a GPU; None of other devices, which do not tell."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
