"""Ranks: how they are started, meet, agree, and end; nothing else knows how many there are."""
