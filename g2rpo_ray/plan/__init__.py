"""What a run will cost, before anything is spent: counts, memory, seconds, and the best split."""
