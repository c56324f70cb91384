"""Routing policies in simulated time: `python -m bench.routing`."""
