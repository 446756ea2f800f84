"""Checkpoints, their files on disk and at an address, and digests that show where two runs differ."""
