"""The numbers that a run leaves, and the report that people read."""
