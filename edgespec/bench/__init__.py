"""`edgespec bench`: measures a model on this machine, row by row, each in its own process."""
