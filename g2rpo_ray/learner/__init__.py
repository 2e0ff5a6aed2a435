"""Advantages to updates: the DeepSpeed engine, its ranks on Ray actors, checkpoints."""
