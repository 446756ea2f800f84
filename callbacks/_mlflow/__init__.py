"""Logs to MLflow through a separate process: what a run logs goes to a spool, which the process delivers."""
