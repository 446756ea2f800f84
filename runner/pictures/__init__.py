"""Pictures of runs and sweeps: the style that they share, and the curves of a run."""
