"""Other libraries: those whose import needs care, each imported in one place, and the names of their hooks."""
