"""Tool calls in answers: how models spell them, and reading them back."""
