"""Measures how well drafters agree with a target, and makes drafters."""
