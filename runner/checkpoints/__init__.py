"""Checkpoints: what they contain, how they are stored on disk, and digests that show where two runs differ."""
