"""Sweeps: which jobs there are, what each does in its place, and what came of all of them."""
