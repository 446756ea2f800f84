"""Text as data: read, tokenized once, cached, and cut into windows."""
