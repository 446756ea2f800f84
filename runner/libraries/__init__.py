"""Libraries that need care when they are imported, each imported in one place."""
