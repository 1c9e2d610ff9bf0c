"""Sources of candidates that need no model: the text, a person's files, and the target's earlier passes."""
