"""The version of Baton. pyproject.toml repeats it."""

VERSION = "0.1.0"
