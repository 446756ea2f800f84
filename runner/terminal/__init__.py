"""Output on a terminal, in a pipe or in a notebook."""
