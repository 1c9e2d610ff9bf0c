"""Verification rules: which path of a tree is accepted. One protocol, and a file for each family of rules."""
