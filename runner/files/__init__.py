"""Files that several processes write: completely or not at all, and one process at a time."""
