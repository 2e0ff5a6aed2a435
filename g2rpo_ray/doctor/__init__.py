"""``g2rpo doctor``: what is wrong with a cluster, and what to do about it; one file a check."""
