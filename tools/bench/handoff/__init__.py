"""Benchmark of the cost of a hand-off, in parts: `python -m tools.bench.handoff`."""
