"""What the comparisons of algorithms share, for `compare_algorithms.py` and `granularity_bias.py`."""
