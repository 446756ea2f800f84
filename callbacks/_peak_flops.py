"""Peak performance of GPUs for dense matrix products, from the vendors' data sheets."""

from __future__ import annotations

import re

GEFORCE: dict[str, tuple[int, float]] = {
    "3090": (10496, 1.695),
    "4060": (3072, 2.46),
    "4060 Ti": (4352, 2.535),
    "4070": (5888, 2.475),
    "4070 SUPER": (7168, 2.475),
    "4070 Ti": (7680, 2.61),
    "4070 Ti SUPER": (8448, 2.61),
    "4080": (9728, 2.505),
    "4080 SUPER": (10240, 2.55),
    "4090": (16384, 2.52),
    "5060": (3840, 2.497),
    "5060 Ti": (4608, 2.572),
    "5070": (6144, 2.512),
    "5070 Ti": (8960, 2.452),
    "5080": (10752, 2.617),
    "5090": (21760, 2.407),
}
"""CUDA cores and boost clock in GHz of GeForce RTX cards, from NVIDIA's specification pages."""

TERAFLOPS: dict[str, dict[str, float]] = {
    # NVIDIA Blackwell Architecture Technical Brief: HGX B200, and a GPU of GB200 NVL72
    r"GB200": {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500},
    r"B200": {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250},
    # NVIDIA's data sheets for H200, H100, GH200 and A100; H20 as published by its sellers
    r"GH200 (120GB|480GB|144G HBM3e)": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"H20": {"fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148},
    r"H200 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    r"H200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"H100 PCIe": {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756},
    r"H100 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5},
    r"H100 80GB HBM3": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"A100-(SXM4?|PCIE)-(40|80)GB|A100 80GB PCIe": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    # NVIDIA's data sheets for V100, V100S, T4, L4, L40S, A10 and RTX A6000
    r"V100S-PCIE-32GB": {"fp32": 16.4, "fp16": 130},
    r"V100-PCIE-(16|32)GB": {"fp32": 14, "fp16": 112},
    r"V100-(SXM2|SXM3|DGXS)-(16|32)GB": {"fp32": 15.7, "fp16": 125},
    r"T4": {"fp32": 8.1, "fp16": 65},
    r"L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    r"L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    r"A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    r"RTX A6000": {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8},
    # NVIDIA's white papers on Ampere GA102, Ada and RTX Blackwell, appendix A: two operations per core and cycle in
    # fp32 and TF32, and four in 16 bits
    **{
        rf"RTX {name}": {"fp32": peak, "tf32": peak, "bf16": 2 * peak, "fp16": 2 * peak}
        for name, (cores, gigahertz) in GEFORCE.items()
        for peak in [2 * cores * gigahertz / 1000]
    },
    # AMD's data sheets for MI300X and MI300A
    r"MI300X": {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4},
    r"MI300A": {"fp32": 122.6, "tf32": 490.3, "bf16": 980.6, "fp16": 980.6},
}
"""Peak TFLOP/s by pattern of the model's name and by number format, without sparsity and accumulating in fp32.

A pattern matches the whole name after the brand. A variant with another word in its name is another chip, has other
clocks, or is part of a GPU (MIG, vGPU), and has no peak here unless it has its own row."""

_BRAND = r"(NVIDIA |Tesla |GeForce |AMD Instinct )*"

_FORMATS = {"fp32": "fp32", "tf32": "tf32", "amp_bf16": "bf16", "bf16": "bf16", "amp_fp16": "fp16"}


def find_peak(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Return a GPU's peak in floating-point operations per second, or None if it is not in the table.

    Args:
        device_name: name of the device as CUDA reports it, such as 'NVIDIA H100 80GB HBM3'.
        precision: precision of the run, such as 'fp32' or 'amp_bf16'.
        tf32: whether fp32 matrix products may use TF32.
    """
    number_format = _FORMATS.get(precision, "")
    if number_format == "fp32" and tf32:
        number_format = "tf32"
    for pattern, peaks in TERAFLOPS.items():
        if re.fullmatch(f"{_BRAND}({pattern})", device_name):
            return peaks[number_format] * 1e12 if number_format in peaks else None
    return None
