"""Data in shards, local or remote: random access through a cache of bounded size, shuffled block by block."""
