"""Stable Diffusion 3.5, medium and large."""
