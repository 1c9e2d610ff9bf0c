"""Programs that people use with a local model, run against `edgespec serve`: `python -m tests.clients`."""
