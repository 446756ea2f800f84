"""What a job can do, one mode each: train, check, explain, and others; see `table`."""
