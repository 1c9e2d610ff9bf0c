"""llama.cpp: models, contexts, caches, vocabularies and draft heads."""

from edgespec.prebuilt import use_wheel

use_wheel()
