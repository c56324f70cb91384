"""Routing policies in simulated time: `python -m tools.bench.routing`."""
