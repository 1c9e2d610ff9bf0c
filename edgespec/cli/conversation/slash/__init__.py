"""The slash commands of a chat."""
