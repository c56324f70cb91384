"""Benchmark of a router's CPU cost, compared with other routers: `python -m tools.bench.router`."""
