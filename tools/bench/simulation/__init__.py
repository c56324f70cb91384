"""Benchmarks of simulated clusters and of capacity planning."""
