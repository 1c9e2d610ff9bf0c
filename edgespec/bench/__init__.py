"""`edgespec bench`: what this machine does with a model, row by row, each in a process of its own."""
