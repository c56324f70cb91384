"""Whole models on a device: construction, execution, correctness and traces."""
