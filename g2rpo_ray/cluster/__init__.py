"""The Ray cluster of a run: reaching it, what it has, room in it, what can go wrong there."""
