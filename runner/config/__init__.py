"""Configs: the command line, the config that Hydra composes from it, the objects built from that, and its errors."""
