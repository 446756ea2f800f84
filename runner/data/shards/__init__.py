"""Data in shards, here or at an address: read at random through a cache of bounded size, in an order of blocks."""
