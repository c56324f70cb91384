"""Code shared by all Baton processes. The engine is in `engine`."""
