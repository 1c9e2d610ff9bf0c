"""Draft heads of all families: their headers, contexts, drafters and trials."""
