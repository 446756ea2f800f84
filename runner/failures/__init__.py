"""Failures: facts about them, readable tracebacks, and exit codes."""
