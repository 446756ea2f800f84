"""What a job can do, one mode each: train, check, explain, evaluate, predict, prove, compare, sync; see `table`."""
