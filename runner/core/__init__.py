"""The event engine: hooks, the state of a run, the logger, and the order in which hooks are called."""
