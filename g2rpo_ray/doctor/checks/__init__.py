"""One file a check; each gives findings."""
