"""Which of the processor's kernel layouts are used: what a person asked for, what works, what is fast."""
