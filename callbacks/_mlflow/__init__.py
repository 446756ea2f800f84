"""Logs to MLflow through a separate process: a run writes to a spool, and the process sends it."""
