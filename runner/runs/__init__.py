"""Runs: what a run leaves in its folder, and how a saved run is found, checked, resumed and rerun."""
