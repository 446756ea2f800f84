"""Peak performance of GPUs for dense matrix products, from the vendors' data sheets."""

from __future__ import annotations

import re

TERAFLOPS: dict[str, dict[str, float]] = {
    # NVIDIA Blackwell Architecture Technical Brief: HGX B200, and a GPU of GB200 NVL72
    r"GB200": {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500},
    r"B200": {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250},
    # NVIDIA's data sheets of H200, H100, GH200 and A100; H20 as its sellers publish it
    r"GH200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"H20": {"fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148},
    r"H200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"H100 PCIe": {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756},
    r"H100 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    r"H100": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    # NVIDIA's data sheets of V100, T4, L4, L40S, A10 and RTX A6000
    r"V100.*PCIE": {"fp32": 14, "fp16": 112},
    r"V100": {"fp32": 15.7, "fp16": 125},
    r"T4": {"fp32": 8.1, "fp16": 65},
    r"L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    r"L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    r"A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    r"RTX A6000": {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8},
    # NVIDIA's white papers of Ampere GA102, Ada and RTX Blackwell, appendix A
    r"RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
    r"RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2},
    r"RTX 4080": {"fp32": 48.7, "tf32": 48.7, "bf16": 97.5, "fp16": 97.5},
    r"RTX 5090": {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5},
    r"RTX 5080": {"fp32": 56.3, "tf32": 56.3, "bf16": 112.6, "fp16": 112.6},
    # AMD's data sheets of MI300X and MI300A
    r"MI300X": {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4},
    r"MI300A": {"fp32": 122.6, "tf32": 490.3, "bf16": 980.6, "fp16": 980.6},
}
"""Peak TFLOP/s by a pattern for the device name and by number format, without sparsity and accumulating in fp32.

The first pattern that matches counts."""

_FORMATS = {"fp32": "fp32", "tf32": "tf32", "amp_bf16": "bf16", "bf16": "bf16", "amp_fp16": "fp16"}


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
