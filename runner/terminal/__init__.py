"""What people see in a terminal, a pipe or a notebook."""
