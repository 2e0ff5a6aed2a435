"""g2rpo-ray: online RL alignment of image models (G2RPO) on a Ray cluster."""

__version__ = "0.1.0"
