"""The modes of a job: train, check, explain, and others; see `runner.cli.rows`."""
