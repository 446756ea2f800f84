"""What is written where others read it: whole or not at all, locked, signed, and without credentials."""
