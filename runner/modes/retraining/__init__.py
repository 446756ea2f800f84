"""Training batches of an earlier run again: from which checkpoint, and what is recorded of them."""
