"""Shared parts of the benches: systems, loads, models, peers, and result records."""
