"""Logs to MLflow through a separate process: a run writes to a spool, which the process delivers."""
