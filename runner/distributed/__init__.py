"""Ranks: how they start, find each other, agree and end. Code elsewhere does not depend on how many there are."""
