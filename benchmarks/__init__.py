"""Scripts that make the published figures."""
