"""Code that depends on the device: moving batches, copying to and from a GPU, memory, and settings for rounding."""
