"""Find, resume, rerun and fork saved runs."""
