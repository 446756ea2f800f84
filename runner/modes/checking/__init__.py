"""What `mode=check` tries and measures without the data: a dry run, mistakes in a config, and memory."""
