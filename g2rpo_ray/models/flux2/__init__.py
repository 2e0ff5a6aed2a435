"""FLUX.2: dev, and the kleins."""
