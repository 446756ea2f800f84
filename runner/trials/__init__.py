"""An experiment tried without a run: dry runs, sizes, memory, and batches of a run trained again."""
