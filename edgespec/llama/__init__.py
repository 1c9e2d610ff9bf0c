"""llama.cpp: models, contexts, caches, vocabularies and draft heads."""

from edgespec.prebuilt import prepare_loading

prepare_loading()
