"""Output for people: in a terminal, a pipe or a notebook."""
