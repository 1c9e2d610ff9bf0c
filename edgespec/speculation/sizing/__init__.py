"""The size of the next tree: by measured cost, or always the same."""
