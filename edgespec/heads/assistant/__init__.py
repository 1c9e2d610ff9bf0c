"""Gemma 4's assistants: small models that look at the keys and values of their target."""
