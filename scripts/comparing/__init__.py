"""The runs that `compare_algorithms.py` compares."""
