"""Safe file access: atomic writes, locks, signatures, and addresses without credentials."""
