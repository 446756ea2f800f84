"""The event engine: what happens when, to whom."""
