"""llama.cpp: models, contexts, caches, vocabularies and draft heads."""
