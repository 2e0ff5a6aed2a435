"""One file for each ``g2rpo COMMAND``: its options and its words."""
