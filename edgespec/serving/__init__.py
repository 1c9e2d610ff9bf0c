"""An OpenAI-compatible HTTP server around one engine; needs the extra `edgespec[serve]`."""
