"""Benchmarks of the running system against a peer or a physical limit. Never in pytest."""
