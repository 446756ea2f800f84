"""Files that several processes may write: written whole or not at all, locked, and signed."""
