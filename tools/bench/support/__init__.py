"""Shared parts of the benchmarks: systems, loads, models, peers, and result records."""
