"""A Ray cluster: reaching it, what it has, room in it, deadlines, what its nodes said last."""
