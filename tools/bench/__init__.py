"""Benchmarks of the running system, each against a peer or a physical limit. Never run by
pytest."""
