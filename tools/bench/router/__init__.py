"""Benchmark of the cost of a router, compared with others: `python -m tools.bench.router`."""
