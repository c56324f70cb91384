"""Checks, then measures, everything on a GPU in one call: `python -m bench.gpu`, in parts."""
