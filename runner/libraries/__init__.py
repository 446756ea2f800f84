"""Libraries whose import needs care, each imported in one place."""
