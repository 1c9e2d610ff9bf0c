"""Conversations with an engine, and the files that keep them."""
