"""Drafters for a target: how well they agree with it, and how to make one."""
