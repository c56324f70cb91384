"""Checks, then measures, everything on a GPU in one call: `python -m tools.bench.gpu`, in parts."""
