"""Model files: their headers (`gguf`), and where they come from (`hub`)."""
