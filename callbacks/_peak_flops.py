"""Peak performance of GPUs for dense matrix products, from the vendors' data sheets."""

from __future__ import annotations

import re

TERAFLOPS: dict[str, dict[str, float]] = {
    r"H200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    r"H100 PCIe": {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513},
    r"H100 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5},
    r"H100": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    r"A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    r"V100.*PCIE": {"fp32": 14, "fp16": 112},
    r"V100": {"fp32": 15.7, "fp16": 125},
    r"T4": {"fp32": 8.1, "fp16": 65},
    r"L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5},
    r"L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
    r"A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    r"RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
    r"RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
}
"""Peak TFLOP/s by a pattern for the device name and by number format, without sparsity and accumulating in fp32.

The first pattern that matches counts."""

_FORMATS = {"fp32": "fp32", "tf32": "tf32", "amp_bf16": "bf16", "bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "fp8"}


def find_peak(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Return a GPU's peak in floating-point operations per second, or None if the table has none.

    Args:
        device_name: name of the device as CUDA reports it, such as 'NVIDIA H100 80GB HBM3'.
        precision: precision of the run, such as 'fp32' or 'amp_bf16'.
        tf32: whether fp32 matrix products may use TF32.
    """
    number_format = _FORMATS.get(precision, "")
    if number_format == "fp32" and tf32:
        number_format = "tf32"
    for pattern, peaks in TERAFLOPS.items():
        # Match whole words only: an A10G is not an A10, and a 3090 Ti is not a 3090.
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9]| Ti| D\b| SUPER)", device_name):
            return peaks[number_format] * 1e12 if number_format in peaks else None
    return None
