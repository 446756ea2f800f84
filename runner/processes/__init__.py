"""Processes: ranks started from inside a job or by torchrun, and the threads of each."""
