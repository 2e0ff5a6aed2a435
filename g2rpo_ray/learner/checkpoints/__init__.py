"""Checkpoints: the format of a state, its parts, and a run's folders of them."""
