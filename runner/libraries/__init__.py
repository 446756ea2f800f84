"""Adapters to other libraries: imports that need care, shortcuts around slow calls, and the names of their hooks."""
