"""How large the next tree is: by measured cost, or always the same."""
