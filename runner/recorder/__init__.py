"""Records training loops that are not the Trainer's: a folder, a result, MLflow and digests for each run."""
