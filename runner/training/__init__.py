"""Training: the Trainer, its loops, and what they measure."""
