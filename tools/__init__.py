"""Tools for work on this repository: codemods. Not part of the wheel."""
