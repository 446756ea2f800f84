"""MLflow, as a process of its own writes to it: what a run leaves for it, and how that is delivered."""
