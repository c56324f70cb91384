"""Calls of the CUDA driver, and device memory that torch does not manage."""
