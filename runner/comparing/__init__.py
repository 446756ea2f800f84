"""Many runs: conditions, statistics, and runs side by side."""
