"""What `edgespec doctor` knows: facts about a machine, and what is wrong with them."""
