"""`edgespec doctor`: facts about a machine, and what is wrong with it for running models."""
