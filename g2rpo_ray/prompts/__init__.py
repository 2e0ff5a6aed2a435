"""Prompts: reading files, the order in which training sees them, and their embeddings."""
