"""The projector of a model, by which llama.cpp turns images into embeddings."""
