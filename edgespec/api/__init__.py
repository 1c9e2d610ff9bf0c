"""The OpenAI API: what requests may say, and what answers and refusals look like."""
