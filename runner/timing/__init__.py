"""The events of a run, and the units of training time: lengths, positions and intervals."""
