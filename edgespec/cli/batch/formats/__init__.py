"""The formats of lines and results: EdgeSpec's own, and that of OpenAI."""
