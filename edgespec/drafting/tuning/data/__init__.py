"""The texts that a drafter is tuned on: prompts, the target's answers, and batches of them."""
