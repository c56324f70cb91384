"""Checks and measurements of all GPU code in one call, in parts: `python -m tools.bench.gpu`."""
