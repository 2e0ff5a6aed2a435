"""One file for each ``g2rpo COMMAND``: its options, its words, what it does."""
