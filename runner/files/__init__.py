"""Files that several processes write: whole or not at all, and one process at a time."""
