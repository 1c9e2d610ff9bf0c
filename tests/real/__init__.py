"""All that EdgeSpec does, once, with a real pair of models: `python -m tests.real FOLDER`."""
