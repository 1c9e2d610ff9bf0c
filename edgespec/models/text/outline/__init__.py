"""Outlines of answers: which tokens may follow where, in thoughts, calls and forms."""
