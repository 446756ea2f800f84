"""What went wrong: facts about a failure, its traceback as people read it, and the exit code."""
