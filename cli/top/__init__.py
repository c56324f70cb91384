"""baton top: a cluster in a terminal."""
