"""Images in prompts: from a file to rows of embeddings that stand among the tokens."""
