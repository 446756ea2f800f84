"""Sweeps: planning the jobs, running each in its own folder, and summarizing the results."""
