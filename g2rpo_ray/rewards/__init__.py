"""Rewards: scorers that run without Ray, and the Ray Serve deployments that serve them."""
