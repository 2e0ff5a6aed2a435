"""Weights compared on held-out prompts, rewards on pictures that are there (``scoring/``)."""
