"""The Anthropic API: `/v1/messages` and its token counts."""
