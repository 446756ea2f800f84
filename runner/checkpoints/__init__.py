"""Checkpoints: what they contain, how they are stored on disk, and digests that tell two runs apart."""
