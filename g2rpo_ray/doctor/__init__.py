"""``g2rpo doctor``: what a cluster is like, what is wrong with it, and what to do about it."""
