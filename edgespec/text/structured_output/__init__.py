"""Structured answers: which tokens may follow where, in thoughts, calls and grammars."""
