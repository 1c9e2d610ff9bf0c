"""The input of a batch: its lines, and the share of them that a run answers."""
