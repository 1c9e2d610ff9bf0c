"""The Ollama API: `/api/chat`, `/api/generate`, and what describes the model."""
