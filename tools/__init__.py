"""Development tools of this repository. Not part of the wheel."""
