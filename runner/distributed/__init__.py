"""Ranks: how they start, find each other, agree and end. Other code does not depend on the number of ranks."""
