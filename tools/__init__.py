"""Tools for work on this repository. Not part of the wheel."""
