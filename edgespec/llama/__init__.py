"""llama.cpp: models, contexts, caches, vocabularies and draft heads."""

from edgespec.base.prebuilt import prepare_loading

prepare_loading()
