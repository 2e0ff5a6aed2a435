"""Trains the models of the tiny world; `scripts/build_tiny_world.py` is its command line."""
