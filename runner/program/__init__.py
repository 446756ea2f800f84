"""Run a command, from its first word to its exit code."""
