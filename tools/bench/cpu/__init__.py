"""Baton on a CPU, beside peers and the machine: `python -m tools.bench.cpu`."""
