"""Sources of candidates that need no model: the sequence, a person's files, the target's earlier passes."""
