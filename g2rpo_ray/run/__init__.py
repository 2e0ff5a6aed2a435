"""A run on the disk: its folder and lock, its scores, its weights, their export."""
