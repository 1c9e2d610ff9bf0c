"""The drafter in torch: its shape, its weights, their rounding, and the file made of them."""
