"""One file a scorer, which needs no Ray; the servers on Ray Serve, and the client that asks."""
