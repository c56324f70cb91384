"""The version of Baton, which pyproject.toml repeats."""

VERSION = "0.1.0"
