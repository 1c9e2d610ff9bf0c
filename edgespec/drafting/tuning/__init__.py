"""Tunes a drafter on what its target says: the target's own answers and its distribution at every token."""
