"""Code shared by all Baton processes. The engine is in `engine`."""

VERSION = "0.1.0"  # pyproject.toml repeats it
