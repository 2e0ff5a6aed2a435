"""What `compare_algorithms.py` and `granularity_bias.py` share."""
