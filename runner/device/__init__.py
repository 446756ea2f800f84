"""What is particular to accelerators: how data gets there, and what numbers and kernels they use."""
