"""Trains the models of the tiny world, for `build_tiny_world.py` and `build_tiny_scorers.py`.

Programs lie in `scripts/` itself, so Python finds this folder beside them; tests find it by
pytest's `pythonpath`. The package ships what came out of it: `g2rpo_ray/tiny_world/assets`.
"""
