"""Compose configs with Hydra, build objects from them, and explain errors."""
