"""Describe failures, check arguments, shorten tracebacks, and choose exit codes."""
