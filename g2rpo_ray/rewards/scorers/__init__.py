"""One file for each scorer, and what several of them share."""
