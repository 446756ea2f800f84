"""Runs: what one leaves in its folder, and how one made before is found, trusted and begun again."""
