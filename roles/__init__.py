"""A node's program: both roles over one engine, and the way from one to the other."""
