"""FLUX.1: dev, schnell, and what has their architecture."""
