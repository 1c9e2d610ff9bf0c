"""Many texts in a pass: who takes part, and how their answers come back."""
