"""Configs: what is typed, what Hydra composes of it, what is made of that, and what is wrong with it."""
