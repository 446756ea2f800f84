"""Data sets of Hugging Face's library `datasets`."""
