"""Qwen-Image, and what has its architecture."""
