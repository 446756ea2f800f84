"""The Trainer and its loops: training, evaluation, gradient accumulation, precision and metrics."""
