"""Configs: what Hydra composes from a command, the objects built from that, and its errors."""
