"""Prompt files, the order in which training sees them, their embeddings, the encoder actor."""
