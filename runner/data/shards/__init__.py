"""Data in shards, local or remote: random access through a cache of bounded size, in an order of blocks."""
