"""EAGLE-3: a layer that drafts from the hidden states of its target."""
