"""Code specific to accelerators: data transfer, number formats and kernels."""
