"""Comparison of runs: conditions that select them, statistics, and tables of how they differ."""
