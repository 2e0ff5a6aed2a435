"""``g2rpo score``: pictures that are there, judged by any scorers, which are compared."""
