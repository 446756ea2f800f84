"""Checkpoints: what they hold, how they lie on disk, and digests that tell two of them apart."""
