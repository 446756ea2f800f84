"""Facts about failures, checks of arguments, readable tracebacks, and exit codes."""
