"""Benchmark of Baton on a CPU, compared with peers and the machine: `python -m tools.bench.cpu`."""
