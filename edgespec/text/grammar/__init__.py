"""Grammars and schemas that answers must follow."""
