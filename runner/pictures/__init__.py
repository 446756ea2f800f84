"""Pictures of runs and sweeps: their shared style, the curves of a run, and samples."""
